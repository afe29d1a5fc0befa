"""Loading pipelines against others on the same videos, and the time to the first batch."""
