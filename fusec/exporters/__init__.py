"""A graph as other tools read it."""
