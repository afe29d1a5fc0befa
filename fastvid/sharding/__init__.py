"""Raw videos in, a dataset out: probe, encode, verify and pack, restartable at any moment."""
