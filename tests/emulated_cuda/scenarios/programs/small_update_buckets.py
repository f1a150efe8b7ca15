"""Train with update buckets of few elements, so that a small model has many of them."""

from __future__ import annotations

import sys

import pretrain_gpt
from megatron.core.optimizer import update_bucket
from megatron.training.exit_reason import run_program

MAX_ELEMENTS = 2000

if __name__ == "__main__":
    update_bucket.cut_into_buckets.__defaults__ = (MAX_ELEMENTS,)
    run_program(lambda: pretrain_gpt.main(sys.argv[1:]))
