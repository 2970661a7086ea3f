"""Store tuned choices on disk, and read them again."""
