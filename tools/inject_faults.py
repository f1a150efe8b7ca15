"""Inject faults (kill, stop, slow, corrupt, cut off) into a training run, and check that nothing was lost."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.chaos import main

if __name__ == "__main__":
    sys.exit(main())
