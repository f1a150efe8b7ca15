"""Checks of a node before a run, with suggested fixes."""
