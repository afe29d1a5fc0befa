"""The demonstration: a motion dataset made on the spot, sharded, loaded and learnt."""
