"""Generate kernels for attention with few features, and for rotary embeddings."""
