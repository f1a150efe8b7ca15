"""What rounding to fp8 reads and writes takes its time; exchanges are those of the recipe."""

from __future__ import annotations

import pytest

from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, OURS
from megatron.planner.prediction import predict
from megatron.planner.step_time import LayerTime
from tests.unit.planner.test_plan import plan_of

SHAPE = (
    "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 8"
)


def layer_of(flags: str) -> LayerTime:
    time = predict(plan_of(f"{SHAPE} {flags}"), OURS, H100).time
    assert time is not None
    return time.layer


def test_each_flag_of_fp8_changes_the_time_of_a_layer() -> None:
    delayed = layer_of("--fp8-format hybrid")
    own, blocks, half = (
        layer_of(f"--fp8-format hybrid {more}")
        for more in ("--fp8-recipe tensorwise", "--fp8-recipe blockwise", "--no-fp8-wgrad")
    )
    assert max(delayed.passes, own.passes) < blocks.passes
    assert delayed.products == pytest.approx(own.products)
    assert own.products < half.products < layer_of("").products
    # Without weight gradients in fp8 nothing is turned, and what they take is gathered in 16 bits.
    assert half.passes < delayed.passes
    assert delayed.tensor_parallel < half.tensor_parallel


def test_adapters_exchange_and_frozen_weights_turn_nothing() -> None:
    adapters = "--lora-rank 64 --load somewhere --finetune"
    plain, wide = layer_of(adapters), layer_of(adapters.replace("64", "128"))
    assert plain.tensor_parallel < wide.tensor_parallel
    frozen, trained = layer_of(f"--fp8-format hybrid {adapters}"), layer_of("--fp8-format hybrid")
    assert frozen.passes < trained.passes
    assert frozen.products < trained.products


def test_weights_that_travel_in_fp8_take_half_the_time() -> None:
    flags = f"{SHAPE.replace('-size 4 --seq', '-size 2 --seq')} --fp8-format hybrid --use-distributed-optimizer"
    half, float8 = (predict(plan_of(f"{flags} {more}"), OURS, H100).time for more in ("", "--fp8-param-gather"))
    assert half is not None
    assert float8 is not None
    assert float8.exposed_data_parallel < half.exposed_data_parallel


def test_each_part_of_experts_that_runs_again_takes_its_time() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048"
    recompute = f"{experts} --recompute-granularity selective --recompute-modules"
    names = "moe_act", "shared_experts", "moe_act shared_experts", "moe"
    plain, *again = (layer_of(more).total for more in (experts, *(f"{recompute} {name}" for name in names)))
    assert plain < again[0] < again[2] <= again[3]
    assert plain < again[1] < again[2]


def test_experts_in_fp8_round_what_their_recipe_says() -> None:
    """Rounded as they come and turned: inputs and gradients of two products, and weights for each pass."""
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --fp8-format hybrid --fp8-recipe"
    half = layer_of(experts.partition("--fp8")[0])
    own, blocks = (layer_of(f"{experts} {recipe}") for recipe in ("tensorwise", "blockwise"))
    assert own.products < half.products
    assert half.passes < own.passes < blocks.passes
    # Each expert is launched for itself, and recipes without a kernel of their own round with several.
    assert half.host < own.host < blocks.host


def test_transformer_engine_computes_weight_gradients_as_the_flag_says() -> None:
    flags = f"{SHAPE} --fp8-format hybrid"
    float8, half = (predict(plan_of(f"{flags} {more}"), MEGATRON_TE, H100).time for more in ("", "--no-fp8-wgrad"))
    assert float8 is not None
    assert half is not None
    assert float8.layer.products < half.layer.products
