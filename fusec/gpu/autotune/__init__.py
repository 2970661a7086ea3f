"""Choose the fastest plan, kernel or split of each step by measured times."""
