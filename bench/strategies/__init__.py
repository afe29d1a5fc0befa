"""What the ways in which replicas agree gain and lose."""
