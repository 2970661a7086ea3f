"""Use files, processes, terminals and clocks safely; nothing of fusec is imported here."""
