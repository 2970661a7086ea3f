"""List what could run a step, time it, and take the fastest."""
