"""Compile a model with symbolic dims for the sizes that it is called with."""
