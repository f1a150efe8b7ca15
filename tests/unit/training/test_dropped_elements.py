"""What dropout drops follows from the seed, the iteration and the sample, and stays from version to version."""

from __future__ import annotations

import pytest

import pretrain_gpt
from megatron.verification.cells import Layout, make_cell
from megatron.verification.run_cell import run_cell


def test_a_run_drops_what_it_dropped_in_earlier_versions() -> None:
    flags = ("--hidden-dropout", "0.2", "--attention-dropout", "0.15", "--seed", "7")
    cell = make_cell("gpt2", Layout(), extra=flags, num_layers=1)
    result = run_cell(cell.flags, 1, cell.data, "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    assert result.losses == pytest.approx([4.329094754805, 4.193468559787, 3.866615253170], rel=1e-10, abs=0.0)
