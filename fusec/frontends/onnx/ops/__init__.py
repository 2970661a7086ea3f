"""Import ONNX ops that compute: one file per op family.

The keyword arguments of an op's function are the attributes of its schema. `clip_6` imports Clip from version 6 on.
"""
