"""The library: knows nothing of command lines, run folders or logs."""
