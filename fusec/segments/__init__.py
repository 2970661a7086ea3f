"""Run a model that is cut where a value must be known on the host: segments, and host steps between them."""
