"""Checkpoints converted, compared and listed, one tensor at a time."""
