"""Print how many parameters a model has and how much memory training it takes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.report_theoretical_memory import main

if __name__ == "__main__":
    sys.exit(main())
