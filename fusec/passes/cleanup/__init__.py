"""Bring graphs into one spelling: fold constants, remove no-ops, merge equal nodes."""
