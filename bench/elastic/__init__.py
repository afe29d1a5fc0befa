"""Training under accidents: nodes that join, leave, are killed and are cut off."""
