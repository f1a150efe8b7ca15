"""Predict the memory and step time of training runs without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
