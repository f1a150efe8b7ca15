"""Merge the .json files of a folder into one file, as Megatron-LM's script of this name does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.openwebtext.merge_jsons import main

if __name__ == "__main__":
    sys.exit(main())
