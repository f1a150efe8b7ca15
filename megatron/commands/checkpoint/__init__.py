"""Commands on checkpoints: convert, compare, list."""
