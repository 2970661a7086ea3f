"""Match patterns in a graph and replace them; know facts about values."""
