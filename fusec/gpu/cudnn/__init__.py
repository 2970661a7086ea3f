"""Ask cuDNN which graphs it runs, and build and serialize its plans, in this process or in worker processes."""
