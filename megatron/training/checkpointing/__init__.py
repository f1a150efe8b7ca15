"""A run's checkpoints: when one is saved, which one is loaded, and what it fills."""
