"""The trainer's own cost, and what models learn."""
