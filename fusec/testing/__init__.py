"""Property-based testing of fusion: strategies for graphs, the properties that must hold of them, and findings."""
