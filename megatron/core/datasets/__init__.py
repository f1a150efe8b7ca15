"""Token files, their indices, and the samples and batches that are read through them."""
