"""Threads and worker processes that fetch and decode clips, the handling of failed clips, and statistics."""
