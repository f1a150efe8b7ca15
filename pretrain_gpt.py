"""Pretrain a GPT model: build the model and the data sets, and compute the loss of a forward step.

A script of your own calls `megatron.training.pretrain` with its own functions instead.
"""

from __future__ import annotations

import sys

from megatron.cli.pretrain import main
from megatron.training import forward_step, provide_datasets, provide_model, run_program

__all__ = ["forward_step", "main", "provide_datasets", "provide_model"]

if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
