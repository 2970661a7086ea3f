"""Choose what runs each step of a program, and where steps are split."""
