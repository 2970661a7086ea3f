"""The ONNX front end: `load.py` reads a model; one file per op family imports its ops."""
