"""Train one model on several devices, each in a process of its own, with the mean of their gradients."""
