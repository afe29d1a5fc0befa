"""Benchmarks: `python -m bench QUESTION` measures one thing."""
