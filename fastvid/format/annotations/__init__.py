"""The annotations of a generation, in memory or mapped from a file that all processes of a node share."""
