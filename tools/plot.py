"""Draw runs from their metrics files as one HTML page or PNG."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.pictures.plot import main

if __name__ == "__main__":
    sys.exit(main())
