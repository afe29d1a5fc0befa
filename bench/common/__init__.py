"""Shared by all benchmarks: machine facts, corpora, simulated hosts."""
