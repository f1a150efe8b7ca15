"""Generating text from a trained model."""
