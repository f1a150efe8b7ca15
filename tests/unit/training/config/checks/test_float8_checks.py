"""What fp8 excludes or leaves without effect."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigurationError
from megatron.training.config.arguments import resolve_arguments
from tests.unit.training.config.command_lines import MINIMAL

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
FP8 = [*MINIMAL, *SIZES.split(), "--bf16", "--fp8-format", "hybrid"]
GATHER = "--fp8-param-gather --use-distributed-optimizer --global-batch-size 2"


@pytest.mark.parametrize(
    ("flags", "beginning"),
    [
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "--main-params-dtype fp16 keeps what the weights"),
        (
            "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step",
            "--fp8-param-gather needs the scales of all updated parameters",
        ),
    ],
)
def test_gathered_fp8_weights_exclude_what_they_would_spoil_or_miss(flags: str, beginning: str) -> None:
    resolve_arguments([*FP8, *GATHER.split()], 2)
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *GATHER.split(), *flags.split()], 2)
    (problem,) = caught.value.problems
    assert problem.startswith(beginning)


def test_norms_that_are_kept_in_fp8_alone_are_not_recomputed_without_a_word() -> None:
    parsed = resolve_arguments([*FP8, "--recompute-activations", "--recompute-modules", "core_attn", "layernorm"], 1)
    assert [note for note in parsed.notes if "layernorm frees nothing in fp8 layers" in note]
