"""What a run prints and writes down while it goes on."""
