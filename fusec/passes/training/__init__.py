"""Save memory traffic in training steps."""
