"""Changes to a dataset that exists: add, merge, remove, relabel, compact."""
