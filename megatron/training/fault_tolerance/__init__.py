"""Fault tolerance: hangs, restarts, replaced ranks, and steps with anomalous results."""
