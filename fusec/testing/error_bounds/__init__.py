"""Bound the differences that rounding explains."""
