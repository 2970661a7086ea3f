"""Generate kernels for convolutions and matrix products that cuDNN runs slowly or not at all."""
