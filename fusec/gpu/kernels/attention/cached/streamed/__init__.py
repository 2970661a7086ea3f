"""Attention over a cache whose warps read keys and values as streams."""
