"""Latent attention in float64: the same losses, gradients and weights at any layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pretrain_gpt
from megatron.verification.cells import Cell, Layout
from megatron.verification.latent_cells import latent_matrix, make_latent_cell
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool

CELLS = (
    make_latent_cell("latent", Layout(tp=2, pp=2, sequence_parallel=True)),
    make_latent_cell("latent-wide-values", Layout(cp=2)),
)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with WorkerPool(8, timeout_s=120) as pool:
        yield Verifier(pool, pretrain_gpt.provide_model, pretrain_gpt.forward_step)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_latent_attention_is_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", latent_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_latent_attention_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
