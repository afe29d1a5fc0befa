"""What every layer needs of the machine: fault points, ranks and cores, progress, readable numbers."""
