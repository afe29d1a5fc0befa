"""Elastic training benchmarks: nodes that join, leave, are killed and are cut off."""
