"""Commands that make datasets from datasets: split, subset, merge, transcode."""
