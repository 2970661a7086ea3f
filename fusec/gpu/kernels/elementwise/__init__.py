"""Generate kernels for pointwise ops and for moving elements."""
