"""Define what must hold of every graph, one function per property."""
