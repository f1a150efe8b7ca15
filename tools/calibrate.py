"""Measure the performance of this node for tools/plan.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
