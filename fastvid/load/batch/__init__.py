"""From decoded clips to the batch that a step sees."""
