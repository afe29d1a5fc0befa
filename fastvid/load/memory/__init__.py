"""Host memory of batches, and the layout of clips in it."""
