"""Measure how long it takes to compile a model, and to compute its first result."""
