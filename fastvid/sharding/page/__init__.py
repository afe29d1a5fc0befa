"""Shows the contents of a dataset, as numbers and as one HTML page."""
