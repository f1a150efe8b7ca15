"""Latent attention in float64: the same losses, gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout
from megatron.verification.model_cells import latent_matrix, make_latent_cell
from megatron.verification.verifier import Verifier

CELLS = (
    make_latent_cell("latent", Layout(tp=2, pp=2, sequence_parallel=True)),
    make_latent_cell("latent-wide-values", Layout(cp=2)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_latent_attention_is_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", latent_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_latent_attention_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
