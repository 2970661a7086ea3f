"""Serve models over HTTP: front ends speak the protocol, workers run batches, and a supervisor restarts them."""
