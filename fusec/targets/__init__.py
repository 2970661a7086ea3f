"""Describe GPUs: one JSON file each, read by `target.load`."""
