"""Three ranks along an axis, in float64: the same losses, gradients and weights as on one process."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell
from megatron.verification.training_cells import odd_matrix
from megatron.verification.verifier import Verifier

DEFAULT = ("qwen-mtp packed tp1 pp1 cp3-a2a", "mixtral plain", "gpt2 plain tp1 pp3 ")


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.name.startswith(DEFAULT) else pytest.mark.long) for cell in odd_matrix()],
    ids=lambda cell: cell.name,
)
def test_an_odd_layout_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
