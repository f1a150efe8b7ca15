"""What fp8 excludes or leaves without effect."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigurationError
from megatron.training.config.arguments import resolve_arguments
from tests.unit.training.config.command_lines import MINIMAL

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
FP8 = [*MINIMAL, *SIZES.split(), "--bf16", "--fp8-format", "hybrid"]
GATHER = "--fp8-param-gather --use-distributed-optimizer --global-batch-size 2"


def test_gathered_fp8_weights_exclude_what_they_would_spoil() -> None:
    resolve_arguments([*FP8, *GATHER.split()], 2)
    flags = "--use-precision-aware-optimizer --main-params-dtype fp16"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *GATHER.split(), *flags.split()], 2)
    (problem,) = caught.value.problems
    assert problem.startswith("--main-params-dtype fp16 keeps what the weights")


LORA = "--lora-rank 2 --load somewhere --finetune"


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (f"{LORA} --no-fp8-wgrad", 1, "--no-fp8-wgrad has no effect with --lora-rank"),
        (f"{LORA} {GATHER}", 2, "--fp8-param-gather has no effect with --lora-rank"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 64 --max-position-embeddings 64 "
            "--tp-comm-overlap --tp-comm-overlap-impl ring",
            2,
            "fp8 products have no chunks",
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", 1, "offloads nothing"),
    ],
)
def test_what_does_nothing_says_so(flags: str, world_size: int, words: str) -> None:
    parsed = resolve_arguments([*FP8, *flags.split()], world_size, needs_files=False)
    assert len([note for note in parsed.notes if words in note]) == 1
