"""Generate products of few rows, such as the tokens that a decoder adds, with constant weights of 16 bits."""
