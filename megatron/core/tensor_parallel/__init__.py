"""Layers, losses and random streams cut over the tensor-parallel group."""
