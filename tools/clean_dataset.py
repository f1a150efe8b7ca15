"""Clean text and JSONL files into one JSONL file, and report which documents were dropped and why."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.clean_dataset import main

if __name__ == "__main__":
    sys.exit(main())
