"""A small deep-learning framework with fusec as its engine: read tape.py, then nn.py, then trainer.py."""
