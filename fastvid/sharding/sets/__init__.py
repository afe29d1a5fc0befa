"""Make datasets from datasets without encoding: split columns, subsets, merges."""
