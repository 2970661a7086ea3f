"""Bring cuDNN up on a machine without a GPU or driver: find its libraries, and stand in for the driver."""
