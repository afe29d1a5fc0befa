"""A run from beginning to end: assemble, check, launch, score, predict, report."""
