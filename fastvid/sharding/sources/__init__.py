"""Find the videos of a dataset: in folders, buckets, URLs and tars, with annotations."""
