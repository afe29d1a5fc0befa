"""The records that a run writes: checkpoints, metrics, speed."""
