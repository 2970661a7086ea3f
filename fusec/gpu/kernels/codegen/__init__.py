"""Generate the CUDA C that kernel families share: pointwise code, indexing, loops and tensor-core tiles."""
