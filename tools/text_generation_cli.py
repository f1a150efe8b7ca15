"""Generate text with the model of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.text_generation_cli import main
from megatron.training import run_program

if __name__ == "__main__":
    run_program(main)
