"""Benchmarks of training strategies."""
