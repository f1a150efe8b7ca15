"""The configuration of a run: its fields, command line, files and presets, and the checks of its values."""
