"""What several strategies use: means over ranks, gradient noise, counted traffic."""
