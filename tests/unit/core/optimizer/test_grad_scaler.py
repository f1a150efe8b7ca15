"""The loss scale's reaction to overflows."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import CheckpointError
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, make_grad_scaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig


def scales(scaler: DynamicGradScaler, history: str) -> list[float]:
    """Return the scale after each iteration: ``x`` overflowed, ``.`` was finite."""
    result = []
    for iteration in history:
        scaler.update(found_inf=iteration == "x")
        result.append(scaler.scale)
    return result


def scale_after(history: str, scale: float, min_scale: float, growth_interval: int, hysteresis: int) -> float:
    """Return the scale after a whole history, read from its text: a growth ends a stretch, overflows count in it."""
    for stretch in re.findall(rf"(?:x|\.)*?\.{{{growth_interval}}}|(?:x|\.)+", history):
        grows = stretch.endswith("." * growth_interval)
        for _ in range(stretch.count("x") - (hysteresis - 1)):
            scale = max(scale / 2, min_scale)
        scale = scale * 2 if grows else scale
    return scale


@given(
    history=st.text("x.", max_size=40),
    min_scale=st.sampled_from([0.25, 1.0, 3.0]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
)
def test_every_history_gives_the_scale_that_the_rule_says(
    history: str, min_scale: float, growth_interval: int, hysteresis: int
) -> None:
    scaler = DynamicGradScaler(64.0, min_scale, growth_interval, hysteresis)
    expected = [
        scale_after(history[: n + 1], 64.0, min_scale, growth_interval, hysteresis) for n in range(len(history))
    ]
    assert scales(scaler, history) == expected


@given(history=st.text("x.", max_size=20), later=st.text("x.", max_size=20))
def test_a_resumed_scale_goes_on_as_one_that_never_stopped(history: str, later: str) -> None:
    first, second = (DynamicGradScaler(64.0, 1.0, growth_interval=3, hysteresis=2) for _ in range(2))
    scales(first, history)
    second.load_state_dict(first.state_dict())
    assert scales(second, later) == scales(first, later)
    assert second.state_dict() == first.state_dict()


def test_first_overflow_is_forgiven_and_later_ones_halve() -> None:
    scaler = DynamicGradScaler(64.0, min_scale=1.0, growth_interval=100, hysteresis=2)
    assert scales(scaler, "x.x..x") == [64, 64, 32, 32, 32, 16]


def test_a_run_of_finite_iterations_doubles_and_restores_the_hysteresis() -> None:
    scaler = DynamicGradScaler(64.0, min_scale=1.0, growth_interval=3, hysteresis=2)
    assert scales(scaler, "xx..x...xx") == [64, 32, 32, 32, 16, 16, 16, 32, 32, 16]


def test_growth_goes_on_from_doubling_to_doubling() -> None:
    scaler = DynamicGradScaler(1.0, min_scale=1.0, growth_interval=2, hysteresis=1)
    assert scales(scaler, "......") == [1, 2, 2, 4, 4, 8]


def test_scale_stays_above_its_minimum() -> None:
    scaler = DynamicGradScaler(16.0, min_scale=6.0, growth_interval=10, hysteresis=1)
    assert scales(scaler, "xxx") == [8, 6, 6]


def test_sixteen_overflows_at_the_start_leave_two_to_the_seventeen() -> None:
    scaler = make_grad_scaler(OptimizerConfig(params_dtype="float16"))
    assert scaler.scale == 2.0**32
    for _ in range(16):
        scaler.update(found_inf=True)
    assert scaler.scale == 131072.0


def test_state_survives_json_and_continues_alike() -> None:
    first = DynamicGradScaler(64.0, min_scale=1.0, growth_interval=4, hysteresis=2)
    scales(first, "x..")
    second = DynamicGradScaler(8.0, min_scale=1.0, growth_interval=4, hysteresis=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert scales(first, "..xx....") == scales(second, "..xx....")


def test_a_checkpoint_without_a_dynamic_scale_is_refused() -> None:
    scaler = DynamicGradScaler(64.0, min_scale=1.0, growth_interval=4, hysteresis=2)
    with pytest.raises(CheckpointError, match="--loss-scale"):
        scaler.load_state_dict(ConstantGradScaler(4.0).state_dict())


@pytest.mark.parametrize(
    ("config", "scale", "is_dynamic"),
    [
        (OptimizerConfig(), 1.0, False),
        (OptimizerConfig(params_dtype="bfloat16"), 1.0, False),
        (OptimizerConfig(params_dtype="float16", loss_scale=128.0), 128.0, False),
        (OptimizerConfig(params_dtype="float16", initial_loss_scale=512.0), 512.0, True),
    ],
)
def test_scaler_follows_the_configuration(config: OptimizerConfig, scale: float, is_dynamic: bool) -> None:
    scaler = make_grad_scaler(config)
    assert scaler.scale == scale
    assert isinstance(scaler, DynamicGradScaler) is is_dynamic
    scaler.update(found_inf=True)
    scaler.update(found_inf=True)
    assert scaler.scale == (scale / 2 if is_dynamic else scale)
