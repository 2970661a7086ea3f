"""Generate kernels that choose some of many elements."""
