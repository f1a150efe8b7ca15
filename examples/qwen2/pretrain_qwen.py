"""Pretrain a Qwen model: pretrain_gpt.py where launch scripts of Pai-Megatron-Patch look for their script."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.pretrain import main
from megatron.training import run_program

if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
