"""The demo: generate a motion dataset, shard it, load it and train on it."""
