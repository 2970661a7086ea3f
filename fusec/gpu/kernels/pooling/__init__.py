"""Generate kernels for pooling, forward and backward."""
