"""How many steps run before layers are captured as CUDA graphs."""

from __future__ import annotations

import pytest

from megatron.training.config.arguments import resolve_arguments
from megatron.training.model_setup import graph_warmup_steps

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --seq-length 16
    --max-position-embeddings 16
    --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 1 --train-iters 9 --lr 1e-3
    --mock-data --cuda-graph-impl local --attention-dropout 0 --bf16"""


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", 3),
        ("--cuda-graph-warmup-steps 1", 1),
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe tensorwise", 1),
        # Its first step has other scales than the later ones.
        ("--cuda-graph-warmup-steps 1 --fp8-format hybrid --fp8-recipe delayed", 2),
        ("--cuda-graph-warmup-steps 5 --fp8-format hybrid --fp8-recipe delayed", 5),
    ],
)
def test_delayed_scaling_needs_two_steps_before_a_capture(flags: str, steps: int) -> None:
    config = resolve_arguments([*FLAGS.split(), *flags.split()], 1).config
    assert graph_warmup_steps(config) == steps
