"""Generate kernels for convolutions that cuDNN runs slowly or not at all."""
