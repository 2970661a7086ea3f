"""Share what measurements need: models, timers, result files."""
