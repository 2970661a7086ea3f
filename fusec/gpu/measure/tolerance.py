"""Bound how far two engines or kernels may differ."""

from __future__ import annotations

# Relative L2 between engines, and between kernels: sums of normal numbers in fp32 of operands in 16 bits or tf32.
TOLERANCE = 2.0**-7
