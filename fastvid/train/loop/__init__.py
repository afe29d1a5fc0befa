"""The training loop, its step, and what it asks of a strategy."""
