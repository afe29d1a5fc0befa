"""What every layer needs once: cores, ranks, array types, argument checks, hashes, child processes, progress, units."""
