"""Loads resumable batches onto a device: order, sampling, augmentation, fetching, decoding, ClipLoader."""
