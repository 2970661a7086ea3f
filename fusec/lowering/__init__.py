"""Describe steps as cuDNN graphs, which are plain data, and simulate them in NumPy.

`fusec.lower_cudnn` has the table of ops.
"""
