"""The loss scale's reaction to overflows."""

from __future__ import annotations

import json

import pytest

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


def test_the_logged_run_of_fifteen_skipped_iterations() -> None:
    scaler = make_grad_scaler(OptimizerConfig(params_dtype="float16"))
    assert scaler.scale == 2.0**32
    for _ in range(15):
        scaler.update(found_inf=True)
    assert scaler.scale == 262144.0


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
