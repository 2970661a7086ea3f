"""Generate the CUDA C that kernels share: pointwise code, indexing, loops, tensor-core tiles."""
