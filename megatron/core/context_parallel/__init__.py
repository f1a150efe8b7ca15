"""Context parallelism: how a sequence is split over ranks, and how attention sees all of it."""
