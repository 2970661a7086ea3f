"""Read what a model file holds: its weights, its functions, and the structure of its graph."""
