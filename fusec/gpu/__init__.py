"""Ask cuDNN, choose plans and kernels by timing them, and launch them."""
