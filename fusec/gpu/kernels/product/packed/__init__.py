"""Generate products of few rows with weights of 4 or 8 bits, which stay packed in memory."""
