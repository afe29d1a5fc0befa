"""Timing decoders on the clips of a dataset: what `fastvid tune` and the benchmarks share."""
