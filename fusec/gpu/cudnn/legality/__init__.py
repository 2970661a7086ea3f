"""Tell if cuDNN can run a graph: ask it in worker processes, and store its verdicts."""
