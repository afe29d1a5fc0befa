"""Memory of batches on the host and on a CUDA device, and the layout of clips in it."""
