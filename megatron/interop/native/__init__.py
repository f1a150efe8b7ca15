"""The native format as a source and as a sink, one tensor at a time."""
