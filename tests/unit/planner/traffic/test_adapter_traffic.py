"""What a step with low-rank adapters sends, recorded without a network, equals the closed form, byte for byte."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.planner.explanation import with_known_vocabulary
from megatron.verification.cells import Layout, make_cell
from tests.harness.step_traffic import assert_same_traffic

ADAPTERS = "--lora-rank 3 --load somewhere --finetune --bf16"
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
MODULES = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
FLOAT8 = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 64 --max-position-embeddings 64
    --fp8-format hybrid --fp8-recipe tensorwise"""


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("flags", "targets", "world_size"),
    [
        pytest.param(TENSOR, "", 2, marks=pytest.mark.long),
        (f"{TENSOR} {PIPELINE} --use-distributed-optimizer", "q_proj v_proj linear_fc2", 8),
        pytest.param(SEQUENCE, "", 2, marks=pytest.mark.long),
        pytest.param(f"{SEQUENCE} {FULL}", "linear_fc1", 2, marks=pytest.mark.long),
        (f"{SEQUENCE} {FLOAT8}", "linear_proj", 2),
        pytest.param(f"{TENSOR} {FULL}", "linear_fc2", 2, marks=pytest.mark.long),
        pytest.param(f"{TENSOR} {MODULES} core_attn mlp", "linear_qkv linear_fc2", 2, marks=pytest.mark.long),
        pytest.param(f"{SEQUENCE} {MODULES} mlp layernorm", "linear_proj linear_fc1", 2, marks=pytest.mark.long),
        pytest.param(f"{SEQUENCE} {MODULES} mlp", "", 2, marks=pytest.mark.long),
        pytest.param(f"{SEQUENCE} --tp-comm-overlap", "linear_fc1", 2, marks=pytest.mark.long),
    ],
)
def test_recorded_bytes_equal_the_closed_form(flags: str, targets: str, world_size: int) -> None:
    named = ["--lora-target-modules", *targets.split()] if targets else []
    words = [*make_cell("gpt2", Layout()).reference_flags, *ADAPTERS.split(), *flags.split(), *named]
    config = with_known_vocabulary(resolve_arguments(words, world_size, needs_files=False).config)
    for rank in {0, world_size - 1}:
        assert_same_traffic(config, rank)
