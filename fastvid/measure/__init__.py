"""Time decoders on the clips of a dataset; used by `fastvid tune` and the benchmarks."""
