"""Launch kernels, plans and whole programs on CUDA streams and as CUDA graphs."""
