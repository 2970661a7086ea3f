"""Choose how values are stored: memory order, views and precision."""
