"""A training step on a GPU that is not there: kernels, memory, waits, communication, and an estimate of its time."""
