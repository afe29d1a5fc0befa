"""Collect decoded clips into the batches that a training step gets."""
