"""Run a compiled model in several processes: one for each GPU of a machine, or in the workers of Dask and Ray."""
