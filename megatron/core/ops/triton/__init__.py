"""Kernels in Triton's language and the autograd functions that launch them. Only code that uses Triton imports this."""
