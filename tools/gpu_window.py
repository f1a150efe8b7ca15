"""Test one GPU in ten minutes, and report support, correctness, and speed compared with the predictions."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu.window.command import main

if __name__ == "__main__":
    sys.exit(main())
