"""Checks of parts that not every model has."""
