"""Batches of varying shape: fastvid's plans beside other samplers and packers."""
