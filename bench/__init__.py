"""Benchmarks, run by `python -m bench QUESTION`."""
