"""The bytes that a step with multi-token prediction (MTP) modules sends equal the closed form."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from megatron.verification.cells import Cell, Layout
from megatron.verification.model_cells import ExpertLayout, make_prediction_cell, prediction_matrix
from megatron.verification.run_cell import resolve_cell
from megatron.verification.training_cells import fully_sharded, hybrid
from tests.harness.balanced_experts import balanced_experts
from tests.harness.sized_cells import (
    ONE_MTP_MODULE,
    TWO_MTP_MODULES,
    UP_PROJECTIONS,
    fp8_flags,
    mtp_cell,
    mtp_expert_cell,
    mtp_latent_cell,
    short_name,
)
from tests.harness.step_traffic import assert_same_traffic

FULL = ("full", "uniform", "2")
CELLS = (
    make_prediction_cell("llama-mtp", Layout(tp=2, pp=2, cp=2, sequence_parallel=True, recompute=FULL)),
    make_prediction_cell("qwen-mtp", Layout(tp=2, recompute=("full", "block", "1", "distributed"))),
    make_prediction_cell("llama-mtp", Layout(tp=4, sequence_parallel=True, tp_overlap=("--tp-comm-overlap",))),
    make_prediction_cell("qwen-mtp", fully_sharded(Layout(tp=2, pp=2, dp=2), overlap=True)),
    hybrid(make_prediction_cell("qwen-mtp", fully_sharded(Layout(pp=2, dp=4), overlap=True))),
    make_prediction_cell("qwen-mtp", Layout(pp=2, dp=2), extra=("--z-loss-coeff", "1e-3")),
    mtp_cell(
        "llama-mtp",
        Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim"),
        (*fp8_flags("tensorwise"), "--fp8-param-gather"),
    ),
    mtp_expert_cell(
        "deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=FULL), TWO_MTP_MODULES
    ),
    mtp_expert_cell(
        "mixtral", ExpertLayout(tp=2, pp=2, sequence_parallel=True, dispatcher="allgather"), ONE_MTP_MODULE
    ),
    mtp_latent_cell(Layout(tp=2, pp=2, sequence_parallel=True, recompute=UP_PROJECTIONS)),
    mtp_latent_cell(Layout(cp=2, cp_comm_type="a2a")),
)


@pytest.mark.parametrize(
    "cell", [CELLS[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in CELLS[1:])], ids=short_name
)
def test_recorded_bytes_equal_the_closed_form(cell: Cell) -> None:
    assert_sent(cell)


@pytest.mark.long
def test_recorded_bytes_equal_the_closed_form_in_the_whole_matrix() -> None:
    for cell in prediction_matrix():
        assert_sent(cell)


def assert_sent(cell: Cell) -> None:
    # Received numbers are not initialized and may be large: in float64 their norm is still finite.
    dtype = "bfloat16" if "--bf16" in cell.flags else "float64"
    config = resolve_cell(cell.flags, cell.world_size, dtype)
    for rank in sorted({0, config.world_size - 1}):
        with balanced_experts() if config.model.num_experts else nullcontext():
            assert_same_traffic(config, rank, cell.data)
