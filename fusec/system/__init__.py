"""Use files, processes, terminals and clocks safely. Nothing here imports the rest of fusec."""
