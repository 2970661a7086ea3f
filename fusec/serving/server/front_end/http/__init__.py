"""Speak HTTP for inference requests: heads, bodies in shared memory, and answers."""
