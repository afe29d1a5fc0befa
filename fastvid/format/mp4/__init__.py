"""Reads the tables of MP4 files."""
