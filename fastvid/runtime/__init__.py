"""Basics for all packages: cores, ranks, array types, argument checks, hashes, child processes, progress, units."""
