"""8-bit floating point: matrices with their scales, and their products."""
