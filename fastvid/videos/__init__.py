"""Videos as objects: one with its facts and frames, a dataset of them, and what a notebook shows of both."""
