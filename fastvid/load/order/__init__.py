"""Map each position of an epoch to a sample, for any number of ranks. Pure arithmetic."""
