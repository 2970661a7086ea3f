"""Import ONNX ops that move, pick and resample elements: one file per op family."""
