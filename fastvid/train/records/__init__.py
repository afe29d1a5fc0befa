"""What a run leaves behind: checkpoints, metrics, speed."""
