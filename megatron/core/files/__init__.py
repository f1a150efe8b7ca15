"""Files that others may have written, opened and read with care."""
