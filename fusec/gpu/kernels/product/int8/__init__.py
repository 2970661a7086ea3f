"""Generate products of many rows of 8-bit integers with constant weights."""
