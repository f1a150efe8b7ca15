"""Compare two checkpoints of any sharding and format; exit with 0 if equal, 1 if not, 2 for wrong usage."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder's inspect.py must not shadow Python's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.diff_checkpoints import main

if __name__ == "__main__":
    sys.exit(main())
