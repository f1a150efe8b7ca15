"""Checks of a run configuration that need no process group and no torch."""
