"""Serve models over HTTP: front ends that speak the protocol, workers that run batches, and who watches them."""
