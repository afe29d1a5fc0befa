"""Engines that encode sources: in processes on this machine, or on the nodes of a Ray cluster."""
