"""Maximal update parametrization (muP): how a model and its learning rates scale with its width."""
