"""Measure calls, the server, and several GPUs."""
