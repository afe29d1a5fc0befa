"""Models that map clips to logits. They stand beside the data path: torch and `fastvid.errors` are all they need."""
