"""Kernels: what computes one thing quickly, each beside its plain torch twin."""
