"""Generate kernels for batch norm in training, whose statistics are taken over the batch."""
