"""Choose among close plans and kernels by the time of the whole model."""
