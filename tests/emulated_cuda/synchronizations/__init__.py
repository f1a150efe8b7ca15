"""Remove each synchronization of the project, one at a time, and see whether the emulator of CUDA reports it."""
