"""Print the number of parameters of a model and the memory that training takes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.report_theoretical_memory import main

if __name__ == "__main__":
    sys.exit(main())
