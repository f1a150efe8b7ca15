"""Print statistics of a data set (.bin/.idx): documents, lengths with a histogram, tokens, samples; or verify it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.inspect_dataset import main

if __name__ == "__main__":
    sys.exit(main())
