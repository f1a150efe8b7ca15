"""Convert, inspect and compare checkpoints."""
