"""Print and draw the report of a hang: who held up whom, and the last communications of every rank."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.hang_report import main

if __name__ == "__main__":
    sys.exit(main())
