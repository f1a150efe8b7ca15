"""Attention sinks: a number for each head that takes part in the sum below the softmax, and in nothing else."""
