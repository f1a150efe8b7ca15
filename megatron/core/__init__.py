"""The library, independent of command lines, run folders and logging."""
