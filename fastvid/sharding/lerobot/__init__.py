"""LeRobot datasets: episodes of several cameras with signals, versions 3.0 and 2.1."""
