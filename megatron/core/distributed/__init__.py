"""Data parallelism: gradient buffers, buckets, sharding, and the last gradient reductions of a step."""
