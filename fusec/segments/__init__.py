"""Run a model that is split at host steps: segments, each a program of its own, and host steps between them."""
