"""Cut a model into segments at values that only the host knows, and join them again where rows are separate."""
