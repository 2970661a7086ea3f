"""Generate kernels for products of matrices, and for convolutions of 1x1, that cuDNN runs slowly or not at all."""
