"""Ask, build and serialize cuDNN plans, in this process or in worker processes."""
