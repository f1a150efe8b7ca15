"""Checkpoints of other programs: each format is read as the native one sees it, and written from it."""
