"""What a training step sends, by what sends it."""
