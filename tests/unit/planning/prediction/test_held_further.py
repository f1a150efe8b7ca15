"""What layers that predict further tokens keep, send and take is what the planner says of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import pretrain_gpt
from megatron.planning.activation_memory import activation_parts, layer_bytes
from megatron.planning.closed_forms import step_traffic
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS_ON_CPU
from megatron.planning.prediction.stage_memory import stage_memory
from megatron.verification.cells import Cell, Layout
from megatron.verification.collective_recorder import record_step
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.latent_cells import make_latent_cell
from megatron.verification.prediction_cells import make_prediction_cell, prediction_matrix
from megatron.verification.run_cell import resolve_cell
from megatron.verification.sharding_cells import fully_sharded, hybrid
from tests.harness.balanced_experts import balanced_experts
from tests.unit.planning.prediction.test_held_memory import SIZES, counted_flops, held_by_step

ONE, TWO = ("--mtp-num-layers", "1"), ("--mtp-num-layers", "2")
UNCHECKED = ("--no-check-for-nan-in-loss-and-grad",)
"""What a process that stands in for a rank is sent is not there."""
LATENT = (
    *("--q-lora-rank", "40", "--kv-lora-rank", "48", "--qk-head-dim", "24", "--qk-pos-emb-head-dim", "16"),
    *("--v-head-dim", "32"),
)
FULL, BLOCK, NORMS = ("full", "uniform", "2"), ("full", "block", "1"), ("selective", "layernorm", "mlp")


def in_float8(recipe: str) -> tuple[str, ...]:
    """Return the flags of a recipe."""
    return ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe)


FLOAT8 = (*in_float8("tensorwise"), "--fp8-param-gather")


def dense(shape: str, layout: Layout, extra: tuple[str, ...] = ()) -> Cell:
    return make_prediction_cell(shape, layout, extra=(*SIZES, *UNCHECKED, *extra))


def of_experts(shape: str, layout: ExpertLayout, further: tuple[str, ...]) -> Cell:
    return make_expert_cell(shape, layout, extra=(*SIZES, *UNCHECKED, "--moe-ffn-hidden-size", "96", *further))


def latent(layout: Layout) -> Cell:
    return make_latent_cell("latent", layout, extra=(*SIZES, *UNCHECKED, *LATENT, *TWO))


CELLS = (
    latent(Layout(pp=2)),
    dense("qwen-mtp", Layout(tp=2, sequence_parallel=True, pp=2)),
    dense("llama-mtp", Layout()),
    dense("qwen-mtp", Layout(tp=2)),
    dense("qwen-mtp", Layout(recompute=FULL)),
    dense("llama-mtp", Layout(pp=2, recompute=BLOCK)),
    dense("qwen-mtp", Layout(tp=2, sequence_parallel=True, recompute=NORMS)),
    dense("qwen-mtp", Layout(pp=2, virtual_stages=2)),
    dense("qwen-mtp", Layout(pp=2, schedule="zero-bubble")),
    dense("qwen-mtp", Layout(cp=2, pp=2)),
    dense("llama-mtp", Layout(cp=2, cp_comm_type="all_gather")),
    dense("llama-mtp", Layout(pp=2, dp=2, sharding="optim_grads", overlap=True)),
    dense("qwen-mtp", Layout(pp=2, dp=2, sharding="optim", overlap=True)),
    dense("llama-mtp", Layout(pp=2, tp=2, sequence_parallel=True), ("--normalization", "LayerNorm")),
    of_experts("mixtral", ExpertLayout(pp=2, dp=2, ep=2), ONE),
    of_experts("deepseek-experts", ExpertLayout(dp=2, ep=2), TWO),
    of_experts("deepseek-experts", ExpertLayout(pp=2, dp=2, ep=2, recompute=("selective", "moe")), ONE),
    latent(Layout(tp=2, sequence_parallel=True, recompute=("selective", "mla_up_proj"))),
    dense("qwen-mtp", Layout(tp=2, sequence_parallel=True), in_float8("tensorwise")),
    dense("qwen-mtp", Layout(pp=2), (*in_float8("delayed"), "--first-last-layers-bf16")),
    dense("llama-mtp", Layout(tp=2, sequence_parallel=True, recompute=NORMS), in_float8("mxfp8")),
    dense("qwen-mtp", Layout(pp=2, recompute=FULL), in_float8("rowwise")),
    dense("llama-mtp", Layout(dp=2, sharding="optim"), (*in_float8("blockwise"), "--fp8-param-gather")),
)


def assert_held(cell: Cell) -> None:
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    plan = Plan.of(config)
    per_stage, flops = config.world_size // plan.parallel_sizes.pp, 0
    # The last norm too has its input in float32 there; the loss keeps a few numbers of each prediction.
    wide = 4 * plan.num_rows * plan.model.hidden_size * (plan.model.normalization == "RMSNorm")
    has_experts = plan.model.num_experts is not None
    for stage in range(plan.parallel_sizes.pp):
        with balanced_experts() if has_experts else nullcontext():
            held = held_by_step(config, stage * per_stage, cell.data, counts_integers=has_experts)
        flops += held.flops * per_stage
        predicted = stage_memory(plan, stage, OURS_ON_CPU)
        counted = (held.weights, held.gradients, held.optimizer)
        name = f"{cell.name}, stage {stage}"
        assert counted == pytest.approx((predicted.weights, predicted.gradients, predicted.optimizer), rel=0.01), name
        kept, ends = activation_parts(plan, stage, layer_bytes(plan, OURS_ON_CPU.saved))
        ends += wide * (ends > 0)
        numbers = (40 if has_experts else 20) * plan.num_predictions
        assert held.saved == pytest.approx(kept + ends, rel=0.01, abs=numbers), name
    if plan.model.recompute_granularity is None:
        assert flops == pytest.approx(counted_flops(plan), rel=0.01), cell.name


@pytest.mark.full
def test_a_step_holds_what_is_predicted() -> None:
    assert_held(CELLS[0])


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS[1:], ids=lambda cell: cell.name)
def test_steps_of_all_layouts_hold_what_is_predicted(cell: Cell) -> None:
    assert_held(cell)


SENT = (
    make_prediction_cell("llama-mtp", Layout(tp=2, pp=2, cp=2, sequence_parallel=True, recompute=FULL)),
    make_prediction_cell("qwen-mtp", Layout(tp=2, recompute=("full", "block", "1", "distributed"))),
    make_prediction_cell("llama-mtp", Layout(tp=4, sequence_parallel=True, tp_overlap=("--tp-comm-overlap",))),
    make_prediction_cell("qwen-mtp", fully_sharded(Layout(tp=2, pp=2, dp=2), overlap=True)),
    hybrid(make_prediction_cell("qwen-mtp", fully_sharded(Layout(pp=2, dp=4), overlap=True))),
    make_prediction_cell("qwen-mtp", Layout(pp=2, dp=2), extra=("--z-loss-coeff", "1e-3")),
    dense("llama-mtp", Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim"), FLOAT8),
    of_experts("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=FULL), TWO),
    of_experts("mixtral", ExpertLayout(tp=2, pp=2, sequence_parallel=True, dispatcher="allgather"), ONE),
    latent(Layout(tp=2, pp=2, sequence_parallel=True, recompute=("selective", "mla_up_proj"))),
    latent(Layout(cp=2, cp_comm_type="a2a")),
)


@pytest.mark.parametrize(
    "cell", [SENT[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in SENT[1:])], ids=lambda cell: cell.name
)
def test_recorded_bytes_equal_the_closed_form(cell: Cell) -> None:
    assert_sent(cell)


@pytest.mark.long
def test_recorded_bytes_equal_the_closed_form_in_the_whole_matrix() -> None:
    for cell in prediction_matrix():
        assert_sent(cell)


def assert_sent(cell: Cell) -> None:
    # Numbers that were never sent may be large: in float64 their norm is still one.
    dtype = "bfloat16" if "--bf16" in cell.flags else "float64"
    config = resolve_cell(cell.flags, cell.world_size, dtype)
    for rank in sorted({0, config.world_size - 1}):
        with balanced_experts() if config.model.num_experts else nullcontext():
            recorded = record_step(config, rank, pretrain_gpt.provide_model, pretrain_gpt.forward_step, cell.data)
        assert recorded == step_traffic(config, rank), f"{cell.name}, rank {rank}"
