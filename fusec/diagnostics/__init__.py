"""Explain and verify what was compiled: why ops did not fuse, and where results are wrong."""
