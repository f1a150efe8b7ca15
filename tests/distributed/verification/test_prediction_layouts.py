"""Multi-token prediction in float64: the same losses, gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import DROPOUT, Cell, Layout
from megatron.verification.model_cells import make_prediction_cell, prediction_matrix
from megatron.verification.verifier import Verifier

CELLS = (
    make_prediction_cell("llama-mtp", Layout(tp=2, pp=2, sequence_parallel=True)),
    make_prediction_cell("qwen-mtp", Layout(cp=2), "packed"),
    make_prediction_cell("qwen-mtp", Layout(pp=2, schedule="zero-bubble")),
    make_prediction_cell("qwen-mtp", Layout(tp=2, pp=2, sequence_parallel=True), extra=DROPOUT),
)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "cell",
    [*CELLS[:2], *(pytest.param(cell, marks=pytest.mark.long) for cell in CELLS[2:])],
    ids=lambda cell: cell.name,
)
def test_further_tokens_are_predicted_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    gradients = verifier.reference(cell).gradients
    assert gradients["mtp.layers.0.eh_proj.weight"].any()


@pytest.mark.long
@pytest.mark.parametrize("cell", prediction_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_further_tokens_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
