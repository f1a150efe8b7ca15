"""Weights sharded over the data-parallel ranks in float64: the same losses, gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import DROPOUT, Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.training_cells import fully_sharded, hybrid, sharding_matrix
from megatron.verification.verifier import Verifier

FULL = ("full", "uniform", "1")
CELLS = (
    make_cell("gpt2", fully_sharded(Layout(tp=2, sequence_parallel=True, pp=2, dp=2, recompute=FULL)), extra=DROPOUT),
    make_cell("llama", fully_sharded(Layout(pp=2, virtual_stages=2, cp=2), overlap=True), "uneven"),
    hybrid(make_cell("gpt2", fully_sharded(Layout(dp=4)), "uneven")),
    make_expert_cell("deepseek-experts", fully_sharded(ExpertLayout(dp=4, ep=2), overlap=True)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_sharded_weights_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", sharding_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_sharded_weights_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
