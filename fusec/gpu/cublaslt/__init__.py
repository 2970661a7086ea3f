"""Run matrix products with cuBLASLt."""
