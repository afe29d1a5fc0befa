"""K-step averaging."""
