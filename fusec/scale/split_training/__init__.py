"""Divide a training step at its gradients, which several workers exchange."""
