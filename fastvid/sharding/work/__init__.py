"""One source from file to verified samples, and the messages in which that travels."""
