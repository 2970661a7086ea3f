"""Speak HTTP in the front ends, which pass requests to workers."""
