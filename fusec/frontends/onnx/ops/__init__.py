"""Import ONNX ops that compute: one file per op family."""
