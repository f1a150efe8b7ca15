"""Frozen dataclasses, one for each subject; the command line is generated from them."""
