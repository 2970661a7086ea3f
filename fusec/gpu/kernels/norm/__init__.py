"""Generate kernels for norms, softmax and reductions, forward and backward."""
