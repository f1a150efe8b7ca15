"""Find the lines of the project that only a CUDA device executes, and which of them run on the emulator."""
