"""Which videos go into a dataset: folders, buckets, web addresses, tars and annotations."""
