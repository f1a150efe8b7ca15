"""Verify on this node that parallel configurations give the results of a single process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.verify_parallelism import main

if __name__ == "__main__":
    sys.exit(main())
