"""Checkpoint formats: each is read tensor by tensor as a `CheckpointSource`, and written."""
