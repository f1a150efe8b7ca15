"""Copies of a run's state in the memory of its machines: what a restart reads in place of a checkpoint."""
