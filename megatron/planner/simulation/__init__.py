"""A training step on a simulated GPU: kernels, memory, waits, communication, and an estimate of its time."""
