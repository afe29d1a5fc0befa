"""Read and decode the sound of samples: the window of a clip, its packets, and the samples at any rate."""
