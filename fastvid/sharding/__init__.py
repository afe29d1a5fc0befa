"""Makes datasets from raw videos: probe, encode, verify and pack; resumable at any moment."""
