"""Tokenize JSONL into data sets for training: PREFIX_KEY_document.bin and .idx for each key."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
