"""Where a configuration comes from beside the command line, and the file that it can be written to."""
