"""Rewrite attention and its projections into what cuDNN and fusec's kernels run fast."""
