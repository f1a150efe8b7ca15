"""A CUDA device that computes on the CPU, for tests of CUDA code without a GPU."""
