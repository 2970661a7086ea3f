"""Generate convolution of images of up to four channels."""
