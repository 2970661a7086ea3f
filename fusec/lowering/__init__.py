"""Describe steps as cuDNN graphs, plain data, and simulate them in NumPy.

`fusec.lower_cudnn` has the table of ops.
"""
