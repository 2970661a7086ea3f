"""Emit graphs for cuDNN's frontend, and list, build, serialize and run their plans."""
