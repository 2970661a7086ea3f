"""Save compiled models as `.fusec` files, and load them."""
