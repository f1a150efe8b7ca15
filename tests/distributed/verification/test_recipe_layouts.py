"""What a recipe adds to a plain training, in float64: the same gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout, make_cell
from megatron.verification.training_cells import (
    CLIPPING,
    GROUPS,
    HEAD_MUP,
    MUP,
    Z_LOSS,
    adapter_matrix,
    optimizer_matrix,
    recipe_matrix,
    with_optimizer_on_host,
)
from megatron.verification.verifier import Verifier

CELLS = (
    make_cell("gpt2", Layout(tp=2, cp=2), "packed", extra=(*Z_LOSS, *MUP, *HEAD_MUP)),
    make_cell("gpt2", Layout(tp=2, pp=2), "uneven", extra=(*Z_LOSS, *GROUPS, *CLIPPING)),
    with_optimizer_on_host(
        make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding="optim_grads", overlap=True))
    ),
)
ELSEWHERE = (*optimizer_matrix(), *adapter_matrix())
FURTHER = [cell for cell in recipe_matrix() if cell not in (*CELLS, *ELSEWHERE)]


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_recipe_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
