"""Transforms of finished clips on the device of the batch, before normalisation."""
