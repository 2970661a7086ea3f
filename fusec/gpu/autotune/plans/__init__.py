"""Choose the plan that runs each cuDNN graph."""
