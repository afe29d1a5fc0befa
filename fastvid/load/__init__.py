"""Dataset and decoder to resumable batches on a device: order, sampling, augmentation, fetching, ClipLoader."""
