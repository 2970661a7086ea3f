"""Choose which steps run together as one kernel."""
