"""Verifies that a dataset's files are what its records say, and self-tests an installation."""
