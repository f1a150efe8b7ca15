"""A run's process: launcher, device, groups, signals, exit status."""
