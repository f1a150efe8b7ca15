"""Explain a training configuration before it runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.explain import main

if __name__ == "__main__":
    sys.exit(main())
