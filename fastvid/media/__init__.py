"""Inspect one video file with FFmpeg: probe, remux, play, prove, limits and rejection reasons."""
