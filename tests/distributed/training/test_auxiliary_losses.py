"""Auxiliary losses of any layer have their gradients at any layout, recomputed or not."""

from __future__ import annotations

import pytest

import pretrain_gpt
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.run_cell import CellResult, assemble, compare, gradient_floor, run_cell
from tests.harness.distributed import run_distributed
from tests.harness.penalized_layers import provide_penalized_gpt

TOLERANCE = 1e-9
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LAYOUTS = {
    "recompute": (1, f"{RECOMPUTE} 3"),
    "pp2-recompute": (2, f"--pipeline-model-parallel-size 2 {RECOMPUTE} 1"),
    "pp2-zero-bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
    "pp2-interleaved": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def train(flags: str, world_size: int) -> CellResult:
    words = (*BASE_FLAGS, *flags.split())
    return run_cell(words, world_size, "plain", "float64", provide_penalized_gpt, pretrain_gpt.forward_step)


@pytest.mark.full
@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.long), "--calculate-per-token-loss"])
def test_gradients_are_those_of_one_process(more: str) -> None:
    expected = train(more, 1)
    reference = assemble(expected.gradients)
    for name, (world_size, flags) in LAYOUTS.items():
        ranks = run_distributed(world_size, train, f"{flags} {more}", world_size)
        fragments = [fragment for rank in ranks for fragment in rank.gradients]
        mismatches, _ = compare(fragments, reference, TOLERANCE, gradient_floor(reference))
        assert not mismatches, (name, mismatches[0].describe())
        assert ranks[0].losses == pytest.approx(expected.losses, rel=TOLERANCE), name


def test_the_loss_that_is_minimized_is_not_the_plain_one() -> None:
    plain = run_cell(BASE_FLAGS, 1, "plain", "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    penalized = train("", 1)
    assert penalized.losses[0] == plain.losses[0]
    assert penalized.grad_norms[0] != pytest.approx(plain.grad_norms[0], rel=1e-3)
