"""Compile a model with symbolic dims for the sizes it is called with."""
