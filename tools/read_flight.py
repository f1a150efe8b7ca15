"""Print and plot a hang report: the ranks that block others, and the last collectives of every rank."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.hang_report import main

if __name__ == "__main__":
    sys.exit(main())
