"""Code shared by several strategies: links, means over ranks, gradient noise, traffic counters."""
