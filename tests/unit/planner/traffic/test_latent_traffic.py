"""The bytes that a step with multi-head latent attention (MLA) sends equal the closed form."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout
from megatron.verification.model_cells import make_latent_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.sized_cells import LATENT_CELLS, NARROW_LATENT, short_name
from tests.harness.step_traffic import assert_same_traffic


@pytest.mark.parametrize(
    "cell",
    [LATENT_CELLS[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in LATENT_CELLS[1:])],
    ids=short_name,
)
def test_recorded_bytes_equal_the_closed_form(cell: Cell) -> None:
    assert_sent(cell)


def test_whole_sequences_are_summed_where_heads_begin() -> None:
    """Without sequence parallelism every rank multiplies by the whole down-projection weights."""
    assert_sent(make_latent_cell("latent", Layout(tp=2), extra=NARROW_LATENT))


def assert_sent(cell: Cell) -> None:
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    for rank in sorted({0, config.world_size - 1}):
        assert_same_traffic(config, rank, cell.data)
