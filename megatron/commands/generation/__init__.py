"""Commands that generate text."""
