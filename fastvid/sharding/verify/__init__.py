"""What a dataset promises against its bytes; datasets and sidecars made of existing tars."""
