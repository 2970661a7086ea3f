"""Describe steps as cuDNN graphs, plain data, and simulate them; `fusec.lower_cudnn` has the table of ops."""
