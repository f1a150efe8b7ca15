"""What passes for a spike, which losses a guarded step accepts, and which rank is to blame for a difference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.config.run_config import FaultConfig
from megatron.training.fault_tolerance.anomaly_detector import ResultWatch
from megatron.training.fault_tolerance.step_replay import (
    RankTrace,
    describe_ranks,
    is_same,
    ranks_not_finite,
    ranks_that_differ,
)
from megatron.training.training_step import is_within


def watch_after(config: FaultConfig, losses: list[float], norms: list[float]) -> ResultWatch:
    watch = ResultWatch(config)
    for loss, norm in zip(losses, norms, strict=True):
        watch.add(loss, norm)
    return watch


def test_nothing_is_looked_for_unless_it_is_asked_for() -> None:
    assert watch_after(FaultConfig(), [2.0] * 99, [1.0] * 99).limits is None
    assert ResultWatch(FaultConfig()).describe(math.nan, 1.0) == "the loss is nan and the gradient norm 1"


def test_half_of_the_window_must_be_there() -> None:
    config = FaultConfig(spike_policy="skip", spike_window=16)
    assert watch_after(config, [2.0] * 7, [1.0] * 7).limits == (math.inf, math.inf)
    limits = watch_after(config, [2.0] * 8, [1.0] * 8).limits
    assert limits == pytest.approx((2.0 + 6 * 0.02, math.exp(6 * 0.05)))


def test_limits_are_standard_deviations_of_the_window_alone() -> None:
    config = FaultConfig(spike_policy="stop", spike_window=8, spike_threshold=3.0)
    watch = watch_after(config, [90.0] * 5 + [3.0, 5.0] * 4, [1e6] * 5 + [1.0, math.e**2] * 4)
    assert watch.limits == pytest.approx((4.0 + 3.0, math.e ** (1.0 + 3.0)))
    assert watch.describe(6.9, 54.0) == ""
    assert watch.describe(7.1, 55.0) == (
        "the loss 7.1 is a spike: the limit from the previous losses is 7; the gradient norm 55 is a spike: the limit "
        "from the previous norms is 54.5982"
    )


def test_what_was_taken_though_it_is_not_finite_is_not_compared_with() -> None:
    config = FaultConfig(spike_policy="skip", spike_window=8)
    finite = watch_after(config, [2.0, 3.0, 1e200] * 2, [1.0, 2.0, 1e200] * 2)
    other = watch_after(config, [2.0, math.inf, 3.0, 1e200] * 2, [1.0, math.nan, 2.0, 1e200] * 2)
    assert finite.limits == other.limits
    assert math.isfinite(finite.limits[0] if finite.limits else math.nan)


def test_megatrons_checks_know_the_largest_of_the_first_hundred() -> None:
    config = FaultConfig(check_for_spiky_loss=True)
    losses = [1.0] * 50 + [3.0] + [1.0] * 48
    watch = watch_after(config, losses, [1.0] * 99)
    assert watch.limits == (math.inf, math.inf)
    watch.add(2.0, 1.0)
    watch.add(29.0, 1.0)
    assert watch.limits == (30.0, math.inf)
    grads = watch_after(FaultConfig(check_for_large_grads=True), [1.0] * 100, [0.5] * 100)
    assert grads.limits == (math.inf, 5.0)


@pytest.mark.parametrize(
    ("loss", "norm", "is_accepted"),
    [
        (2.0, 3.0, True),
        (2.1, 3.0, False),
        (2.0, 3.1, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (-math.inf, 1.0, False),
    ],
)
def test_what_is_at_most_the_limit_and_finite_is_accepted(loss: float, norm: float, is_accepted: bool) -> None:
    found = is_within((2.0, 3.0), torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))
    assert bool(found) is is_accepted


def test_without_a_limit_any_finite_loss_is_accepted() -> None:
    assert bool(is_within((math.inf, math.inf), torch.tensor(1e30), torch.tensor(math.inf)))
    assert not bool(is_within((math.inf, math.inf), torch.tensor(math.inf), torch.tensor(1.0)))


CHUNKS, STAGES, COPIES = 2, 2, 3


def traces(spoiled: dict[tuple[int, int], float], gradients: dict[int, float]) -> list[RankTrace]:
    """Return the figures of two stages with three tensor-parallel ranks; ``spoiled`` names some by rank and chunk."""
    return [
        RankTrace(
            rank=rank,
            host="node",
            place={"pp": rank // COPIES, "dp": 0, "cp": 0, "tp": rank % COPIES},
            forward={(chunk, 0): spoiled.get((rank, chunk), 7.0) for chunk in range(CHUNKS)},
            gradient=gradients.get(rank, 3.0),
        )
        for rank in range(STAGES * COPIES)
    ]


GOOD = traces({}, {})


def blamed(spoiled: dict[tuple[int, int], float], gradients: dict[int, float]) -> list[int]:
    return [trace.rank for trace in ranks_that_differ(GOOD, traces(spoiled, gradients))]


def test_the_first_in_the_forward_pass_is_blamed() -> None:
    all_gradients = dict.fromkeys(range(6), math.nan)
    assert blamed({(4, 0): 8.0, (3, 1): 8.0, (5, 1): 8.0}, all_gradients) == [4]
    # Chunk 1 of the first stage comes after chunk 0 of the last.
    assert blamed({(1, 1): 8.0, (4, 1): 8.0}, all_gradients) == [1]
    assert blamed({(0, 0): math.nan, (2, 0): math.inf}, {}) == [0, 2]


def test_the_last_stage_is_blamed_where_gradients_alone_differ() -> None:
    assert blamed({}, {0: 4.0, 1: 4.0, 5: 4.0}) == [5]
    assert blamed({}, {2: 3.0001}) == []


def test_gradients_that_one_computation_has_not_recorded_are_not_compared() -> None:
    first, again = traces({}, {}), [dataclasses.replace(trace, large_gradient=5.0) for trace in GOOD]
    assert ranks_that_differ(first, again) == []
    moved = [dataclasses.replace(trace, large_gradient=5.0 + (trace.rank == 4)) for trace in GOOD]
    assert [trace.rank for trace in ranks_that_differ(again, moved)] == [4]
    bad = [dataclasses.replace(trace, large_gradient=math.nan if trace.rank == 3 else 5.0) for trace in GOOD]
    assert [trace.rank for trace in ranks_not_finite(bad)] == [3]


def test_what_is_not_finite_is_found_without_another_computation() -> None:
    assert [trace.rank for trace in ranks_not_finite(traces({(5, 1): math.nan}, {}))] == [5]
    assert [trace.rank for trace in ranks_not_finite(traces({}, {1: math.inf}))] == [1]
    assert ranks_not_finite(GOOD) == []


def test_figures_that_differ_by_rounding_are_the_same() -> None:
    assert is_same(1.0, 1.0005)
    assert not is_same(1.0, 1.002)
    assert is_same(math.nan, math.inf)
    assert not is_same(math.nan, 1.0)
    assert is_same(None, None)
    assert not is_same(None, 1.0)


def test_ranks_are_named_with_their_hosts() -> None:
    assert describe_ranks(GOOD[:1]) == "rank 0 on node"
    assert describe_ranks(GOOD[1:3]) == "one of rank 1 on node, rank 2 on node, which cannot be distinguished"
