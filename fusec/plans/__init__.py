"""Record what cuDNN answered and which plans were chosen, in memory and on disk."""
