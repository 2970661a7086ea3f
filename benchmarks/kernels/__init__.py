"""Time single kernels and cuDNN plans, and measure what they are worth to models."""
