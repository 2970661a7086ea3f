"""Time whole models: against torch and XLA, in training, quantised, and without single choices."""
