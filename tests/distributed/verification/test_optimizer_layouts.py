"""Muon and Lion in float64: the same weights after three steps at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.training_cells import MUON, MUON_WITH_LION, optimizer_matrix
from megatron.verification.verifier import Verifier

SHARDED = Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True)
CELLS = (
    make_cell("llama", SHARDED, extra=MUON),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim"), extra=MUON),
    make_cell("llama", Layout(pp=2, dp=2), extra=MUON_WITH_LION),
)
FURTHER = [cell for cell in optimizer_matrix() if cell not in CELLS]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_an_optimizer_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.full
def test_muon_makes_other_weights_than_adam(verifier: Verifier) -> None:
    layout = Layout(tp=2)
    verifier.check(make_cell("llama", layout, extra=MUON))
    muon = verifier.reference(make_cell("llama", layout, extra=MUON)).parameters
    verifier.check(make_cell("llama", layout))
    adam = verifier.reference(make_cell("llama", layout)).parameters
    others = {name for name in muon if not (muon[name] - adam[name]).any()}
    # Adam updates those of the first step from the same gradients; then the losses differ, and so do all weights.
    assert others == set()
