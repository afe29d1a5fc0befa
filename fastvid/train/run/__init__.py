"""A run from start to finish: assembly, dry run, launch, scoring, prediction, report."""
