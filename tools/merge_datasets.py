"""Merge all data sets (.bin/.idx pairs) of a folder into one, in the order of their names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.merge_datasets import main

if __name__ == "__main__":
    sys.exit(main())
