"""Generate kernels of decoders: attention over a cache of earlier rows, and the rows written into it."""
