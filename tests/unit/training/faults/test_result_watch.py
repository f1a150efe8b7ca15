"""What passes for a spike: losses and norms far above those of the window, or ten times the largest at first."""

from __future__ import annotations

import math

import pytest

from megatron.config.run_config import FaultConfig
from megatron.training.fault_tolerance.anomaly_detector import ResultWatch


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
        "the loss 7.1 is a spike: up to 7 would follow those before; "
        "the gradient norm 55 is a spike: up to 54.5982 would follow those before"
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
