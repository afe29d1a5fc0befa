"""Decode planned packets to frames: requests, back-ends and pixels."""
