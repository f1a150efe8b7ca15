"""Pretrain a GPT with the default model provider, data set provider and forward step.

To replace them, write a script that calls `megatron.training.pretrain.pretrain` with your own functions.
"""

from __future__ import annotations

import sys

from megatron.cli.pretrain import main
from megatron.training import forward_step, provide_datasets, provide_model, run_program

__all__ = ["forward_step", "main", "provide_datasets", "provide_model"]

if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
