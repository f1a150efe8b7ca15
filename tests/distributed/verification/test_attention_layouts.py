"""Sinks, layers without positions and GPT-OSS's layers in float64: the same losses, gradients and weights anywhere."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout
from megatron.verification.model_cells import ExpertLayout, attention_matrix, make_attention_cell
from megatron.verification.verifier import Verifier

CELLS = (
    make_attention_cell("sinks", Layout(cp=2, cp_comm_type="a2a")),
    make_attention_cell("gpt-oss", ExpertLayout(tp=2, pp=2, sequence_parallel=True)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_such_a_model_is_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", attention_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_such_models_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
