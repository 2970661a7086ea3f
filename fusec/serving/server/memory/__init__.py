"""Memory with request bodies and tensors, which processes share."""
