"""What rounding to fp8 reads and writes is what a dry run's kernels did; exchanges are those of the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.expert_layer import ExpertLayer
from megatron.planner.float8_work import float8_cast_bytes, float8_expert_cast_bytes
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, OURS
from megatron.planner.layer_time import LayerTime
from megatron.planner.prediction import predict
from tests.unit.planner.test_plan import plan_of

MIB = 2**20
LLAMA_70B: dict[str, Any] = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "swiglu": True,
    "bf16": True,
    "fp8_format": "hybrid",
}
SHAPE = (
    "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 8"
)


@pytest.mark.parametrize(
    ("config", "casts", "sums"),
    [
        ({}, 9184, 6528),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4464 + 512, 3264),
        ({"fp8_recipe": "tensorwise"}, 9184 + 7552 + 3776.7, 6528),
    ],
)
def test_kernels_of_a_dry_run_move_as_many_bytes(config: dict[str, Any], casts: float, sums: float) -> None:
    """The figures are of one layer of 8192 tokens: its casts, absolute values, transposes, and sums of gradients."""
    model = GPTConfig(**LLAMA_70B, **config)
    rows = 8192 // model.tensor_model_parallel_size
    assert float8_cast_bytes(model, 8192, rows) / MIB == pytest.approx(casts + sums, rel=1e-4)


@pytest.mark.parametrize(("recipe", "moved"), [("rowwise", 208_600), ("blockwise", 236_500), ("mxfp8", 254_100)])
def test_recipes_without_a_kernel_of_their_own_move_what_torch_does(recipe: str, moved: float) -> None:
    model = GPTConfig(**LLAMA_70B, fp8_recipe=recipe)
    assert float8_cast_bytes(model, 8192, 8192) / MIB == pytest.approx(moved + 6528, rel=0.02)


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
    assert delayed.passes < own.passes < blocks.passes
    assert delayed.products == own.products < half.products < layer_of("").products
    # Without weight gradients in fp8 nothing is turned, and what they take is gathered in 16 bits.
    assert half.passes < delayed.passes
    assert delayed.tensor_parallel < half.tensor_parallel


def test_both_regions_of_a_layer_exchange_what_the_recipe_sends() -> None:
    """Of ten exchanges of 16 bits, of 15 µs each, six are of 8: inputs, gathered twice, and gradients of outputs."""
    half, float8 = layer_of("").tensor_parallel, layer_of("--fp8-format hybrid").tensor_parallel
    begun = 10 * 15e-6
    assert float8 - begun == pytest.approx(0.7 * (half - begun))


def test_adapters_exchange_and_frozen_weights_turn_nothing() -> None:
    adapters = "--lora-rank 64 --load somewhere --finetune"
    plain, wide = layer_of(adapters), layer_of(adapters.replace("64", "128"))
    assert plain.tensor_parallel < wide.tensor_parallel
    frozen, trained = layer_of(f"--fp8-format hybrid {adapters}"), layer_of("--fp8-format hybrid")
    assert frozen.passes < trained.passes
    assert frozen.weight_gradients == 0.0 < trained.weight_gradients


def test_weights_that_travel_in_fp8_take_half_the_time() -> None:
    flags = f"{SHAPE.replace('-size 4 --seq', '-size 2 --seq')} --fp8-format hybrid --use-distributed-optimizer"
    half, float8 = (predict(plan_of(f"{flags} {more}"), OURS, H100).time for more in ("", "--fp8-param-gather"))
    assert half is not None
    assert float8 is not None
    assert float8.exposed_data_parallel < half.exposed_data_parallel


def test_each_part_of_experts_that_runs_again_takes_its_time() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048"
    recompute = f"{experts} --recompute-granularity selective --recompute-modules"
    again = [layer_of(f"{recompute} {name}").again for name in ("moe_act", "shared_experts", "moe_act shared_experts")]
    assert 0 < again[0] < again[1]
    assert again[2] == pytest.approx(again[0] + again[1])
    assert again[2] < layer_of(f"{recompute} moe").again


def test_experts_in_fp8_round_what_their_recipe_says() -> None:
    """Rounded as they come and turned: inputs and gradients of two products, and weights for each pass."""
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --fp8-format hybrid --fp8-recipe"
    half = layer_of(experts.partition("--fp8")[0])
    own, blocks = (layer_of(f"{experts} {recipe}") for recipe in ("tensorwise", "blockwise"))
    assert own.products < half.products
    assert half.passes < own.passes < blocks.passes
    # Each expert is launched for itself.
    assert half.floor == own.floor
    assert half.expert_floor < own.expert_floor < blocks.expert_floor
    layer = ExpertLayer(plan_of(f"{SHAPE} {experts} tensorwise").model, 2048, 1, 2)
    rows, h, width = layer.given, 4096, layer.width
    operands = rows * ((h + width) * (9 + 3) + (width + h) * (9 + 1))
    assert float8_expert_cast_bytes(layer) == operands + 8 * 2 * h * width * (9 + 3 + 8)


def test_the_product_in_front_of_a_further_token_is_in_fp8_too() -> None:
    model = GPTConfig(**LLAMA_70B, mtp_num_layers=1, tensor_model_parallel_size=2, sequence_parallel=True)
    rows, inner, columns = 4096, 2 * 8192, 4096
    join = float8_cast_bytes(model, 8192, rows, has_join=True) - float8_cast_bytes(model, 8192, rows)
    # An input rounded, and turned where it is gathered; a weight rounded for two passes and summed; and a gradient.
    assert join == 3 * rows * inner + 2 * 8192 * inner + (3 + 3 + 8) * inner * columns + (3 + 1) * 8192 * columns


def test_transformer_engine_is_predicted_as_before() -> None:
    flags = f"{SHAPE} --fp8-format hybrid"
    times = [predict(plan_of(f"{flags} {more}"), MEGATRON_TE, H100).time for more in ("", "--no-fp8-wgrad")]
    assert times[0] == times[1]
