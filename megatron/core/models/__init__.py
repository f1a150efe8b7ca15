"""Complete models built from transformer blocks."""
