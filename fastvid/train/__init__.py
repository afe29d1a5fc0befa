"""The trainer: configuration, loop, schedule, checkpoints, elasticity, evaluation; strategies in `strategies`."""
