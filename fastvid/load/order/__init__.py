"""Which sample each position of an epoch is, for any number of ranks. Pure arithmetic."""
