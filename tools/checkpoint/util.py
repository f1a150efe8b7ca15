"""Convert a checkpoint: convert.py under its former name in Megatron-LM."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder's inspect.py must not shadow Python's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
