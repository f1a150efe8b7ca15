"""Text before training: cleaned, tokenized, merged and inspected."""
