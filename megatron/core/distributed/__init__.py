"""Data parallelism: flat gradient buffers, buckets and what happens once per step after them."""
