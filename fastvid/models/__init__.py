"""Models that map clips to logits; they need only torch and `fastvid.errors`, not the data path."""
