"""Checkpoints: saved, found, loaded and converted, in every format."""
