"""Decoding benchmarks: fastvid against other decoders on the same videos."""
