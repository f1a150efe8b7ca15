"""Kill, stop, slow, corrupt and cut off a training run, and see that nothing was lost."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.chaos import main

if __name__ == "__main__":
    sys.exit(main())
