"""Run batches of one model on several devices, each in a process of its own."""
