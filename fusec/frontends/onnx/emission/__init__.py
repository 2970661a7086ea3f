"""Emit the ops that a node becomes: its attributes, the names it can see, and what only the host can compute."""
