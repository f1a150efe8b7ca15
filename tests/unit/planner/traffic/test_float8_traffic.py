"""What layers in fp8 send, recorded without a network, equals the closed form, byte for byte."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megatron.core.ops.fp8_quantizers import Float8State
from megatron.verification.cells import Layout, make_cell
from megatron.verification.run_cell import resolve_cell
from megatron.verification.traffic import Traffic
from tests.harness.step_traffic import assert_same_traffic

SHAPE = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 64 --max-position-embeddings 64
    --bf16 --fp8-format hybrid"""
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
MODULES = "--recompute-granularity selective --recompute-modules"
LATENT = """--multi-latent-attention --position-embedding-type rope --kv-lora-rank 16 --qk-head-dim 24
    --qk-pos-emb-head-dim 16 --v-head-dim 8 --qk-layernorm --no-check-for-nan-in-loss-and-grad"""
EXPERTS = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
FULL = "--recompute-granularity full --recompute-method"
FURTHER = "--mtp-num-layers 2 --position-embedding-type rope --no-check-for-nan-in-loss-and-grad"


def assert_sent(flags: str, world_size: int = 2) -> Traffic:
    """Assert that all accounts of a step with a history agree, and return what is sent."""
    words = (*make_cell("gpt2", Layout()).reference_flags, *SHAPE.split(), *flags.split())
    config = resolve_cell(words, world_size, "bfloat16")
    with patch.object(Float8State, "has_history", property(lambda self: True, lambda self, value: None), create=True):
        return assert_same_traffic(config, 0)


ALWAYS = [
    *(f"{SEQUENCE} --fp8-recipe {recipe}" for recipe in ("delayed", "tensorwise")),
    f"{SEQUENCE} --fp8-recipe rowwise {MODULES} layernorm mlp",
    f"{SEQUENCE} --fp8-recipe mxfp8 {FULL} block --recompute-num-layers 1 --first-last-layers-bf16",
]
MORE = [
    *(f"{SEQUENCE} --fp8-recipe {recipe} {FURTHER}" for recipe in RECIPES),
    *(f"{SEQUENCE} --fp8-recipe {recipe} {FURTHER} {MODULES} layernorm mlp" for recipe in ("rowwise", "mxfp8")),
    f"{SEQUENCE} --fp8-recipe tensorwise {FURTHER} --no-fp8-wgrad --first-last-layers-bf16",
    f"{SEQUENCE} --fp8-recipe delayed {FURTHER} {FULL} uniform --recompute-num-layers 1",
    f"--tensor-model-parallel-size 2 --fp8-recipe tensorwise {FURTHER}",
    f"--fp8-recipe delayed {FURTHER} --use-distributed-optimizer --fp8-param-gather",
    f"{SEQUENCE} --fp8-recipe delayed {LATENT} --q-lora-rank 48 {EXPERTS} --first-last-layers-bf16",
    *(f"{SEQUENCE} --fp8-recipe {recipe}" for recipe in ("rowwise", "mxfp8")),
    f"{SEQUENCE} --fp8-recipe blockwise",
    "--tensor-model-parallel-size 2 --fp8-recipe tensorwise",
    f"{SEQUENCE} --fp8-recipe tensorwise --no-fp8-wgrad",
    f"{SEQUENCE} --fp8-recipe tensorwise {MODULES} core_attn mlp",
    f"{SEQUENCE} --fp8-recipe delayed {FULL} uniform --recompute-num-layers 3",
    *(f"{SEQUENCE} --fp8-recipe {recipe} {LATENT} --q-lora-rank 48 {MODULES} mla_up_proj" for recipe in RECIPES),
    *(f"{SEQUENCE} --fp8-recipe {recipe} {LATENT} {MODULES} layernorm core_attn mlp" for recipe in RECIPES),
    f"{SEQUENCE} --fp8-recipe tensorwise --no-fp8-wgrad {LATENT} --q-lora-rank 48",
    f"{SEQUENCE} --fp8-recipe delayed {LATENT} {FULL} uniform --recompute-num-layers 1 --first-last-layers-bf16",
    f"--tensor-model-parallel-size 2 --fp8-recipe tensorwise {LATENT}",
    f"--expert-model-parallel-size 2 --fp8-recipe delayed {EXPERTS} --use-distributed-optimizer",
    f"{SEQUENCE} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --fp8-recipe delayed {EXPERTS}",
]


@pytest.mark.default(1)
@pytest.mark.parametrize("flags", [*ALWAYS, *(pytest.param(flags, marks=pytest.mark.long) for flags in MORE)])
def test_recorded_bytes_equal_the_closed_form(flags: str) -> None:
    assert_sent(flags)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "more",
    [
        "--first-last-layers-bf16",
        "--overlap-param-gather-with-optimizer-step",
        *(pytest.param(f"{LATENT} {queries}", marks=pytest.mark.long) for queries in ("", "--q-lora-rank 48")),
    ],
)
def test_gathered_weights_are_as_the_closed_form_says(more: str) -> None:
    sharded = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
    assert_sent(f"{sharded} --fp8-param-gather {more}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "world_size"),
    [
        ("", 2),
        ("--expert-model-parallel-size 2", 4),
        ("--expert-model-parallel-size 2 --add-qkv-bias --overlap-param-gather-with-optimizer-step", 4),
        (f"--expert-model-parallel-size 2 {SEQUENCE} --expert-tensor-parallel-size 1", 4),
        (f"--expert-model-parallel-size 2 {SEQUENCE} --expert-tensor-parallel-size 2", 4),
        ("--num-distributed-optimizer-instances 2", 4),
        (f"--expert-model-parallel-size 2 {LATENT} --data-parallel-sharding-strategy optim_grads", 4),
    ],
)
def test_gathered_weights_of_experts_are_as_the_closed_form_says(more: str, world_size: int) -> None:
    sharded = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
    assert_sent(f"{sharded} --fp8-param-gather --fp8-recipe delayed {EXPERTS} {more}", world_size)


@pytest.mark.full
def test_gathers_are_of_half_the_bytes() -> None:
    """All six of a layer and micro-batch are: two forward, two of gradients, and two of inputs once more."""
    one = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --num-layers-at-end-in-bf16 0"
    in_all, in_one = (assert_sent(f"{SEQUENCE} --fp8-recipe delayed {flags}") for flags in ("", one))
    few, many = (traffic["all_gather", ("tp",)] for traffic in (in_all, in_one))
    scattered = in_all["reduce_scatter", ("tp",)]
    hidden_bytes, num_microbatches = scattered.num_bytes // scattered.num_calls, 8
    assert few.num_calls == many.num_calls
    assert many.num_bytes - few.num_bytes == 3 * 6 * num_microbatches * hidden_bytes // 2
