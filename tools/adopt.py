"""Convert another trainer's launch script or configuration file to a command of this project."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.adopt.adopt import main

if __name__ == "__main__":
    sys.exit(main())
