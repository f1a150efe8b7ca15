"""Run a training step on a simulated GPU; report kernels, memory, waits and communication, and estimate its time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.simulate import main

if __name__ == "__main__":
    sys.exit(main())
