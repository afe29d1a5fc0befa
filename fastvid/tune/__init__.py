"""Which profile suits a user's own videos: a sample of them in every profile, measured. See `fastvid tune`."""
