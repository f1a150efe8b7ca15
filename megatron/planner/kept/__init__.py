"""What the parts of a layer keep for its backward pass."""
