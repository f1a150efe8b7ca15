"""Context parallelism: how a sequence is cut over ranks, and how attention sees all of it."""
