"""What is in a dataset, as numbers and as one HTML page."""
