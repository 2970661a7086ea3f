"""Order the steps of a program and place its values in memory."""
