"""Split a model into segments where a value must be known on the host, and join them again where rows are separate."""
