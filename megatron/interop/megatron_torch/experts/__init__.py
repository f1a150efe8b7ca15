"""Experts in Megatron's files: their keys and their arguments, and those of what else such models have."""
