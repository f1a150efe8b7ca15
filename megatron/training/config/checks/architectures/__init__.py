"""Checks of kinds of layers, one file a kind."""
