"""Indexes videos where they are, by ranges of their files."""
