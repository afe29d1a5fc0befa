"""Decoders against others on the same videos."""
