"""Formulas of saved activations and messages, with which tests compare the planner's traces."""
