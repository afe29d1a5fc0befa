"""Loading benchmarks: pipelines against other loaders on the same videos, and the time to the first batch."""
