"""The predicted time of layers and of a step: windows, positions, latent attention, and fp8's own work."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.planner.communication import Links, exposed_replica_seconds
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import H100
from megatron.planner.implementations import MEGATRON_TE, NATIVE, find_implementation
from megatron.planner.memory import layer_trace, stage_state
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.planner.step_time import LayerTime
from megatron.verification.cells import BASE_FLAGS, SHAPES, Layout
from megatron.verification.hybrid_cells import make_hybrid_cell
from megatron.verification.model_cells import ExpertLayout, make_latent_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.sized_cells import NARROW_LATENT, UP_PROJECTIONS
from tests.unit.planner.test_plan import plan_of

EXPERT_FLAGS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall")


def test_attention_looks_no_further_than_its_window() -> None:
    config = resolve_arguments(
        [*BASE_FLAGS, *SHAPES["mistral"], "--seq-length", "64", "--window-size", "15,0", "--bf16"], 1, needs_files=False
    ).config
    plan = Plan.of(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=52)))
    whole = dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, window_size=None, window_attn_skip_freq=None)
    )
    both = [predict(each, NATIVE, H100) for each in (whole, plan)]
    times = [each.time for each in both]
    assert times[0] is not None
    assert times[1] is not None
    # Every other layer has a window of 16 of 64 keys: 16 * (64 - 8) of 64 * 32 scores.
    assert times[1].layer.attention == times[0].layer.attention
    flops = [each.model.forward_flops_per_sequence(64) for each in (whole, plan)]
    scores = 4.0 * plan.model.query_projection_size
    assert flops[0] - flops[1] == pytest.approx(2 * scores * (64 * 32 - 16 * 56))
    assert both[0].tflops is not None
    assert both[1].tflops == pytest.approx(both[0].tflops * times[0].total / times[1].total)


def test_layers_without_rotary_positions_rotate_nothing() -> None:
    flags = (
        "--model-preset",
        "llama3.1-8b",
        "--num-layers",
        "4",
        "--mock-data",
        "--bf16",
        "--train-iters",
        "1",
        "--lr",
        "1e-4",
    )
    config = resolve_arguments([*flags, "--micro-batch-size", "1"], 1, needs_files=False).config
    plan = Plan.of(with_known_vocabulary(config))
    steps = []
    for pattern in (None, "4", "1"):
        model = dataclasses.replace(plan.model, no_rope_freq=pattern)
        steps.append(time_of_step(dataclasses.replace(plan, model=model)))
    every, without_some, none = steps
    assert every > none
    assert every - without_some == pytest.approx((every - none) / 4)


def time_of_step(plan: Plan) -> float:
    time = predict(plan, NATIVE, H100).time
    assert time is not None
    return time.total


def layer_of(layout: Layout, more: tuple[str, ...]) -> LayerTime:
    cell = make_latent_cell("latent", layout, extra=more)
    time = predict(Plan.of(resolve_cell(cell.flags, cell.world_size, "bfloat16")), NATIVE, H100).time
    assert time is not None
    return time.layer


def test_layers_of_one_part_are_predicted_and_latent_experts_save_less() -> None:
    predictions = []
    for latent in ((), ("--moe-latent-size", "8")):
        cell = make_hybrid_cell("nemotron", ExpertLayout(dp=2, ep=2), extra=latent)
        plan = Plan.of(resolve_cell(cell.flags, cell.world_size, "bfloat16"))
        predictions.append(predict(plan, NATIVE, H100))
    assert all(each.time is not None for each in predictions)
    assert predictions[1].stages[0].activations < predictions[0].stages[0].activations


def test_recomputed_and_wider_heads_take_longer() -> None:
    plain, again = (layer_of(Layout(recompute=recompute), NARROW_LATENT) for recompute in ((), UP_PROJECTIONS))
    assert again.products > plain.products
    assert again.total > plain.total
    wider = layer_of(Layout(), (*NARROW_LATENT, "--qk-head-dim", "64"))
    assert wider.products > plain.products
    assert wider.attention > plain.attention
    # MLA sends its narrow latent vectors, and other attention sends whole hidden states.
    ends = layer_of(Layout(tp=2, sequence_parallel=True), NARROW_LATENT).tensor_parallel
    assert (
        0.0
        < ends
        < layer_of(Layout(tp=2, sequence_parallel=True), (*NARROW_LATENT, "--kv-lora-rank", "4096")).tensor_parallel
    )


def plan_of_layers(*flags: str, world_size: int = 1) -> Plan:
    config = resolve_arguments([*BASE_FLAGS, *flags, "--bf16"], world_size, needs_files=False).config
    return Plan.of(with_known_vocabulary(config))


def test_host_launches_every_operator_program_and_autograd_function() -> None:
    plan = plan_of_layers("--cuda-graph-impl", "none")
    trace = layer_trace(plan, H100.capability, 0)
    operators, programs, functions = (sum(phase[kind] for phase in trace.launches) for kind in range(3))
    assert operators + programs == len(trace.operations)
    # Two norms with the sums before them, four linear layers, the split of the projection, and the activation.
    assert functions == 8
    assert programs > 0
    time = predict(plan, NATIVE, H100).time
    assert time is not None
    seconds = operators * 9.7e-6 + programs * 56.5e-6 + functions * 147.6e-6
    assert time.layer.host == pytest.approx(seconds)
    assert time.host == pytest.approx(plan.num_microbatches * plan.model.num_layers * seconds)
    # These layers are small.
    assert time.is_host_bound


def test_replayed_layers_need_no_host() -> None:
    graphs, launched = (
        predict(plan_of_layers("--cuda-graph-impl", kind), NATIVE, H100).time for kind in ("local", "none")
    )
    assert graphs is not None
    assert launched is not None
    plan = plan_of_layers("--cuda-graph-impl", "local")
    # A forward and a backward pass are one launch each.
    assert graphs.host == pytest.approx(plan.num_microbatches * plan.model.num_layers * 2 * 9.7e-6)
    assert launched.host > 10 * graphs.host
    assert graphs.layer.device == launched.layer.device
    assert graphs.total < launched.total


@pytest.mark.parametrize(
    ("more", "num_ranks"),
    [
        ((), 2),
        ((), 4),
        (("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--hidden-size", "32", "--ffn-hidden-size", "64"), 2),
        (("--attention-backend", "unfused"), 2),
    ],
)
def test_unbalanced_experts_take_the_time_of_the_most_loaded_rank(more: tuple[str, ...], num_ranks: int) -> None:
    plan = plan_of_layers(*EXPERT_FLAGS, *more, "--expert-model-parallel-size", str(num_ranks), world_size=num_ranks)
    even, uneven = (predict(plan, find_implementation("native", factor), H100).time for factor in (1.0, 3.0))
    assert even is not None
    assert uneven is not None
    assert uneven.layer.expert_parallel == pytest.approx(3 * even.layer.expert_parallel)
    trace = layer_trace(plan, H100.capability, 0)
    is_expert = trace.column("is_expert") > 0
    # Two linear layers per expert, forward and twice backward; several experts are one GEMM in 16 bits.
    num_gemms = 6 * (4 // num_ranks if "--fp8-format" in more else 1)
    assert is_expert.sum() == num_gemms
    of_experts = sum(trace.column("flops")[is_expert])
    added = uneven.layer.products - even.layer.products
    assert added > 2 * of_experts / H100.matmul_flops(1 if "--fp8-format" in more else 2)
    assert added < even.layer.products * 2
    assert uneven.layer.attention == even.layer.attention


@pytest.mark.parametrize("factor", [0.5, math.inf, math.nan])
def test_load_of_experts_is_not_below_the_mean(factor: float) -> None:
    with pytest.raises(ConfigurationError, match=f"--expert-imbalance {factor:g} is below 1 or not finite"):
        find_implementation("native", factor)


def test_hidden_reductions_slow_the_overlapped_matmuls() -> None:
    sizes = ("--use-distributed-optimizer", "--global-batch-size", "8")
    plan = plan_of_layers(*sizes, "--overlap-grad-reduce", "--overlap-param-gather", world_size=2)
    links = Links(H100, plan.parallel_sizes)
    state = stage_state(plan, 0, NATIVE)
    sent = links.replica_seconds(state.gradients) + links.replica_seconds(state.gathered_bytes)
    hidden = exposed_replica_seconds(plan, links, state, slowest=1.0)
    assert hidden == pytest.approx(20 / 132 * sent)
    assert exposed_replica_seconds(plan, links, state, slowest=0.0) == pytest.approx(sent)
    on_cpu = Links(dataclasses.replace(H100, num_sms=0), plan.parallel_sizes)
    assert exposed_replica_seconds(plan, on_cpu, state, slowest=1.0) == 0


def test_recomputed_layers_are_launched_again() -> None:
    blocks = ("--num-layers", "4", "--recompute-granularity", "full", "--recompute-method", "block")
    none, one, four = (
        predict(plan_of_layers("--num-layers", "4", *flags), NATIVE, H100).time
        for flags in ((), (*blocks, "--recompute-num-layers", "1"), (*blocks, "--recompute-num-layers", "4"))
    )
    assert none is not None
    assert one is not None
    assert four is not None
    assert one.host - none.host == pytest.approx((four.host - none.host) / 4)
    assert four.host > none.host


SHAPE = (
    "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 8"
)


def float8_layer_of(flags: str) -> LayerTime:
    time = predict(plan_of(f"{SHAPE} {flags}"), NATIVE, H100).time
    assert time is not None
    return time.layer


def test_each_flag_of_fp8_changes_the_time_of_a_layer() -> None:
    delayed = float8_layer_of("--fp8-format hybrid")
    own, blocks, half = (
        float8_layer_of(f"--fp8-format hybrid {more}")
        for more in ("--fp8-recipe tensorwise", "--fp8-recipe blockwise", "--no-fp8-wgrad")
    )
    # A scale of the whole matrix needs its amax first. A block's scale does not: one kernel reads the matrix once.
    assert max(delayed.passes, blocks.passes) < own.passes
    assert delayed.products == pytest.approx(own.products)
    assert own.products < half.products < float8_layer_of("").products
    # Without weight gradients in fp8 nothing is turned, and what they take is gathered in 16 bits.
    assert half.passes < delayed.passes
    assert delayed.tensor_parallel < half.tensor_parallel


def test_adapters_exchange_and_frozen_weights_turn_nothing() -> None:
    adapters = "--lora-rank 64 --load somewhere --finetune"
    plain, wide = float8_layer_of(adapters), float8_layer_of(adapters.replace("64", "128"))
    assert plain.tensor_parallel < wide.tensor_parallel
    frozen, trained = float8_layer_of(f"--fp8-format hybrid {adapters}"), float8_layer_of("--fp8-format hybrid")
    assert frozen.passes < trained.passes
    assert frozen.products < trained.products


def test_weights_that_travel_in_fp8_take_half_the_time() -> None:
    flags = f"{SHAPE.replace('-size 4 --seq', '-size 2 --seq')} --fp8-format hybrid --use-distributed-optimizer"
    half, float8 = (predict(plan_of(f"{flags} {more}"), NATIVE, H100).time for more in ("", "--fp8-param-gather"))
    assert half is not None
    assert float8 is not None
    assert float8.exposed_data_parallel < half.exposed_data_parallel


def test_each_part_of_experts_that_runs_again_takes_its_time() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048"
    recompute = f"{experts} --recompute-granularity selective --recompute-modules"
    names = "moe_act", "shared_experts", "moe_act shared_experts", "moe"
    plain, *again = (float8_layer_of(more).total for more in (experts, *(f"{recompute} {name}" for name in names)))
    assert plain < again[0] < again[2] <= again[3]
    assert plain < again[1] < again[2]


def test_experts_in_fp8_round_what_their_recipe_says() -> None:
    """Rounded as they come and turned: inputs and gradients of two products, and weights for each pass."""
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --fp8-format hybrid --fp8-recipe"
    half = float8_layer_of(experts.partition("--fp8")[0])
    own, blocks = (float8_layer_of(f"{experts} {recipe}") for recipe in ("tensorwise", "blockwise"))
    assert own.products < half.products
    assert half.passes < blocks.passes < own.passes
    # Each expert is launched for itself. A scale of the whole matrix takes kernels for the amax and for the scale.
    assert half.host < blocks.host < own.host


def test_transformer_engine_computes_weight_gradients_as_the_flag_says() -> None:
    flags = f"{SHAPE} --fp8-format hybrid"
    float8, half = (predict(plan_of(f"{flags} {more}"), MEGATRON_TE, H100).time for more in ("", "--no-fp8-wgrad"))
    assert float8 is not None
    assert half is not None
    assert float8.layer.products < half.layer.products
