"""Time work on the device and compare its results, on random data."""
