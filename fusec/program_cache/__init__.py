"""Cache the programs of model files, so that compiling one again neither reads the model nor runs a pass."""
