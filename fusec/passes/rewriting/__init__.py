"""Match patterns in a graph and replace them, and derive facts about values."""
