"""Fold constants, pads and scales into convolutions and matrix products."""
