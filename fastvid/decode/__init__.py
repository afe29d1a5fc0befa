"""Planned packets to frames: requests, back-ends and pixels."""
