"""Tensor and sequence parallelism: sharded layers, cross-entropy, initialization, random streams, recompute."""
