"""Hold a compiled program and bind its steps to a backend and to memory."""
