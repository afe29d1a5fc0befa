"""A global batch that grows during the run."""
