"""Plot a planned or recorded pipeline schedule as text, SVG or PNG, with its bubble and memory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.visualize_pipeline import main

if __name__ == "__main__":
    sys.exit(main())
