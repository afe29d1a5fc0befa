"""Where sources are worked on: processes of this machine, or the nodes of a Ray cluster."""
