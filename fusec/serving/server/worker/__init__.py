"""Form batches of requests in the worker processes, and run them on one device."""
