"""What latent attention keeps, sends and takes is what the planner says of it."""

from __future__ import annotations

import pytest

import pretrain_gpt
from megatron.planning.closed_forms import step_traffic
from megatron.planning.gpu import H100
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS
from megatron.planning.prediction.layer_time import LayerTime
from megatron.planning.prediction.prediction import predict
from megatron.verification.cells import Layout
from megatron.verification.collective_recorder import record_step
from megatron.verification.latent_cells import make_latent_cell
from megatron.verification.run_cell import resolve_cell
from tests.unit.planning.prediction.test_held_memory import SIZES, assert_held

# What a process that stands in for a rank is sent is not there.
WIDTHS = (
    *(*SIZES, "--no-check-for-nan-in-loss-and-grad", "--micro-batch-size", "2"),
    *("--kv-lora-rank", "48", "--qk-head-dim", "24", "--qk-pos-emb-head-dim", "16"),
)
WIDE = (*WIDTHS, "--v-head-dim", "56")
NARROW = (*WIDTHS, "--q-lora-rank", "40", "--v-head-dim", "32")
WHOLE = (*WIDTHS, "--v-head-dim", "40")
FLOAT8 = (*NARROW, "--q-lora-rank", "48", "--bf16", "--cpu-matmul", "mkl", "--fp8-format", "hybrid", "--fp8-recipe")
UP, CORE_AND_UP = ("selective", "mla_up_proj"), ("selective", "core_attn", "mla_up_proj")
LAYOUTS = (
    ("latent", Layout(tp=2, sequence_parallel=True, recompute=UP), NARROW),
    ("latent", Layout(tp=2, sequence_parallel=True, pp=2), NARROW),
    ("latent-wide-values", Layout(), WIDE),
    ("latent-wide-values", Layout(tp=2, sequence_parallel=True), WHOLE),
    ("latent-wide-values", Layout(recompute=UP), WIDE),
    ("latent", Layout(pp=2, recompute=("full", "uniform", "1")), NARROW),
    ("latent", Layout(recompute=CORE_AND_UP), NARROW),
    ("latent", Layout(tp=2, cp=2, sequence_parallel=True, recompute=CORE_AND_UP), NARROW),
    *(("latent", Layout(cp=2, cp_comm_type=exchange), NARROW) for exchange in ("p2p", "all_gather")),
    ("latent-wide-values", Layout(cp=2, cp_comm_type="a2a"), WIDE),
    *(("latent", Layout(cp=2, cp_comm_type=exchange, recompute=UP), NARROW) for exchange in ("a2a", "all_gather")),
)
FLOAT8_LAYOUTS = (
    ("latent", Layout(tp=2, sequence_parallel=True, recompute=UP), (*FLOAT8, "delayed")),
    ("latent", Layout(), (*FLOAT8, "delayed")),
    ("latent", Layout(), (*FLOAT8, "tensorwise", "--no-fp8-wgrad")),
    ("latent-wide-values", Layout(recompute=UP), (*WIDE, "--bf16", "--cpu-matmul", "mkl", "--fp8-format", "hybrid")),
    ("latent", Layout(recompute=CORE_AND_UP), (*FLOAT8, "delayed")),
    ("latent", Layout(recompute=("selective", "core_attn", "layernorm")), (*FLOAT8, "tensorwise")),
    ("latent", Layout(pp=2, recompute=("full", "uniform", "1")), (*FLOAT8, "delayed")),
    ("latent", Layout(cp=2, cp_comm_type="all_gather"), (*FLOAT8, "delayed")),
)
CUT = Layout(tp=2)
"""Without sequence parallelism every rank multiplies by the narrow weights whole: operations are not counted."""


def test_a_step_holds_what_is_predicted() -> None:
    shape, layout, more = LAYOUTS[0]
    assert_held(make_latent_cell(shape, layout, extra=more))


@pytest.mark.long
def test_steps_of_all_layouts_hold_what_is_predicted() -> None:
    for shape, layout, more in (*LAYOUTS, *FLOAT8_LAYOUTS):
        assert_held(make_latent_cell(shape, layout, extra=more))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, len(LAYOUTS)))])
def test_recorded_bytes_equal_the_closed_form(number: int) -> None:
    assert_sent(*LAYOUTS[number])


def test_whole_sequences_are_summed_where_heads_begin() -> None:
    assert_sent("latent", CUT, NARROW)


def assert_sent(shape: str, layout: Layout, more: tuple[str, ...]) -> None:
    cell = make_latent_cell(shape, layout, extra=more)
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    for rank in {0, config.world_size - 1}:
        recorded = record_step(config, rank, pretrain_gpt.provide_model, pretrain_gpt.forward_step, cell.data)
        assert recorded == step_traffic(config, rank), rank


def layer_of(layout: Layout, more: tuple[str, ...]) -> LayerTime:
    cell = make_latent_cell("latent", layout, extra=more)
    time = predict(Plan.of(resolve_cell(cell.flags, cell.world_size, "bfloat16")), OURS, H100).time
    assert time is not None
    return time.layer


def test_heads_that_are_made_again_and_wider_ones_take_longer() -> None:
    plain, again = (layer_of(Layout(recompute=recompute), NARROW) for recompute in ((), UP))
    assert again.again > plain.again == 0.0
    wider = layer_of(Layout(), (*NARROW, "--qk-head-dim", "64"))
    assert wider.products > plain.products
    assert wider.attention > plain.attention
    # Narrow vectors travel, of which the attention of other models sends whole states.
    ends = layer_of(Layout(tp=2, sequence_parallel=True), NARROW).tensor_parallel
    assert (
        0.0 < ends < layer_of(Layout(tp=2, sequence_parallel=True), (*NARROW, "--kv-lora-rank", "4096")).tensor_parallel
    )
