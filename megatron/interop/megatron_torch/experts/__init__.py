"""Experts in Megatron's files: their keys and their arguments."""
