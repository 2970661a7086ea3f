"""Share options, reading, printing and compiling among commands."""
