"""Import ONNX ops that move, select and resample elements: one file per op family."""
