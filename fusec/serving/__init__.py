"""Serve compiled models: a predictor that batches, and a server that speaks the Open Inference Protocol."""
