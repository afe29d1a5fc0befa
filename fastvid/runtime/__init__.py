"""Basics for every layer: cores, ranks, array types, argument checks, hashes, child processes, progress, units."""
