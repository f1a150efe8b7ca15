"""A run's data: which samples it asks for, and the micro-batches it gets."""
