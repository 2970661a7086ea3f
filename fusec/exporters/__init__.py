"""Write graphs in the formats of other tools."""
