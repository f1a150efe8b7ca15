"""Prove that a parallel layout computes what one process computes."""
