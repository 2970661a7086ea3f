"""Measure fusec and check it on GPUs. README.md says which script answers which question."""
