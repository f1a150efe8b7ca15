"""Files that others made."""
