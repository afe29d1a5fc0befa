"""Sharding benchmarks: time of sharding, quality of encodings."""
