"""Verifies a dataset's promises against its bytes, and self-tests an installation."""
