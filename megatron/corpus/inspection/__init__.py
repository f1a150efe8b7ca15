"""Statistics and damage of token files."""
