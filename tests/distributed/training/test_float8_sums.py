"""Why fp8's amaxes differ between layouts: what is summed in parts is rounded in parts, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.training import training_step
from tests.distributed.training.float8_runs import Float8Runs, losses, scaling
from tests.distributed.training.sums_in_halves import run_with_sums_in_halves
from tests.harness.faults import Faults, run_with_faults

TP2 = "--tensor-model-parallel-size 2"
HEADS_EXCHANGED = "--context-parallel-size 2 --cp-comm-type a2a"
ONE_STEP = "--fp8-recipe delayed --train-iters 1 --lr-warmup-iters 0"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Float8Runs:
    return Float8Runs(tmp_path_factory.mktemp("float8"))


@pytest.mark.full
@pytest.mark.parametrize("num_steps", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_process_that_sums_two_rounded_halves_has_the_bits_of_two_tensor_parallel_ranks(
    train: Float8Runs, num_steps: int
) -> None:
    steps = f"--fp8-recipe delayed --train-iters {num_steps} --lr-warmup-iters 0"
    halves, checkpoints = train(steps, 1, run_with_sums_in_halves)
    ranks, others = train(f"{steps} {TP2}", 2)
    assert losses(halves) == losses(ranks)
    expected = scaling(others)
    assert all(torch.equal(values, expected[name]) for name, values in scaling(checkpoints).items())
    # Of one process that sums at once they are others.
    plain, without_halves = train(steps, 1)
    assert losses(plain) != losses(ranks)
    assert not torch.equal(scaling(without_halves)["amax_history"], expected["amax_history"])


@pytest.mark.full
def test_ranks_that_exchange_heads_have_one_processs_amaxes_until_weights_differ(train: Float8Runs) -> None:
    """They sum nothing in parts but the gradients of weights, which all come after the amaxes of a step."""
    ranks, one = (scaling(train(f"{ONE_STEP} {flags}", n)[1]) for flags, n in ((HEADS_EXCHANGED, 2), ("", 1)))
    assert torch.equal(ranks["amax_history"], one["amax_history"])


def run_nudged(argv: Sequence[str], faults: Faults) -> int:
    """Train with half a bit of bfloat16 more or less in each gradient that is a sum of rounded numbers."""
    generator = torch.Generator().manual_seed(int(argv[-1]))
    finalize = training_step.finalize_model_grads

    def finalize_and_nudge(chunks: Sequence[Any], *args: Any) -> None:
        finalize(chunks, *args)
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            gradient = parameter.main_grad.tensor
            if gradient.dim() == 1:
                signs = torch.randint(-1, 2, gradient.shape, generator=generator)
                gradient += 2.0**-9 * gradient.abs().max() * signs

    with patch.object(training_step, "finalize_model_grads", finalize_and_nudge):
        return run_with_faults(argv, faults)


@pytest.mark.long
def test_half_a_bit_in_the_gradients_of_vectors_moves_amaxes_as_far_as_two_ranks_do(train: Float8Runs) -> None:
    six = "--fp8-recipe delayed --train-iters 6"
    one, ranks = (
        scaling(train(f"{six} {flags}", n)[1])["amax_history"] for flags, n in (("", 1), (HEADS_EXCHANGED, 2))
    )
    nudged = [
        scaling(train(f"{six} --exit-interval {100 + seed}", 1, run_nudged)[1])["amax_history"] for seed in range(1, 4)
    ]
    *spread, found = ((one / other - 1).nan_to_num().abs().max().item() for other in (*nudged, ranks))
    print(f"largest differences of amaxes after six steps: {spread} of nudged runs, {found} of two ranks")
    assert 0 < found <= 3 * max(spread)
