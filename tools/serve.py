"""Answer OpenAI's API with the model of a checkpoint, and show a page."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.generation.serve import main
from megatron.training.process.process_exit import run_program

if __name__ == "__main__":
    run_program(main)
