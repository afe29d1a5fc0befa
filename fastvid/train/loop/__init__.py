"""The training loop, its step, and the strategy interface."""
