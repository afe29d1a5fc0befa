"""Changes an existing dataset: add, merge, remove, relabel, compact."""
