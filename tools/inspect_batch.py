"""Show the samples that a step of a run trains on: text, document, file, offset and data set of the blend."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.inspect_batch import main

if __name__ == "__main__":
    sys.exit(main())
