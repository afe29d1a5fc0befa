"""Commands for the generations of a dataset: log, gc."""
