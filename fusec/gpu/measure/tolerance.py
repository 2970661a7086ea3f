"""Bound the difference of results of two engines or kernels."""

from __future__ import annotations

# Relative L2 distance, for fp32 sums of products of normal numbers in 16 bits or tf32.
TOLERANCE = 2.0**-7
