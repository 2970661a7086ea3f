"""Start the processes that ask cuDNN and build plans, give them work, and replace those that die."""
