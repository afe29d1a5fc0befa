"""Scaling benchmarks: training on many ranks, measured part by part and predicted from measured parts."""
