"""Run functions on several ranks, and whole training commands, from a test."""
