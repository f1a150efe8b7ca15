"""Pretrain a GPT: how its model and its data sets are made, and what a forward step computes.

A script of your own calls `megatron.training.pretrain.pretrain` with functions in place of these.
"""

from __future__ import annotations

import sys

from megatron.cli.pretrain import main
from megatron.training import forward_step, provide_datasets, provide_model, run_program

__all__ = ["forward_step", "main", "provide_datasets", "provide_model"]

if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
