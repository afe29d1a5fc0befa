"""Commands for the generations of a dataset: log, diff, tag, gc."""
