"""Measure every profile on a sample of a user's videos and recommend one. See `fastvid tune`."""
