"""Everything about one GPU."""
