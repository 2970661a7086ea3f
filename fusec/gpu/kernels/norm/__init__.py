"""Generate kernels for reductions, softmax and norms, forward and backward."""
