"""Learning rates and weight decays by samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.formats.megatron.common_state import schedule_state, stored_schedule
from megatron.core import registry
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    ScheduleConfig,
    conflicting_fields,
    decoupled_learning_rate,
    learning_rate,
    reconcile_schedules,
    weight_decay,
)
from megatron.training import register_lr_schedule

GOLDEN = Path(__file__).parents[3] / "golden"


class Recorder:
    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def set_learning_rate(
        self, learning_rate: float, weight_decay: float, decoupled_learning_rate: float | None = None
    ) -> None:
        self.values.append((learning_rate, weight_decay))


def rates(config: ScheduleConfig, *samples: int) -> list[float]:
    return [learning_rate(config, count) for count in samples]


@pytest.mark.parametrize("name", ["tp1", "dp2", "tp2pp2_from_tp1"])
def test_reference_run_of_ten_iterations(name: str) -> None:
    config = ScheduleConfig(max_lr=3e-3, min_lr=3e-4, lr_warmup_steps=24, lr_decay_steps=80, lr_decay_style="cosine")
    lines = (GOLDEN / "train" / f"{name}.jsonl").read_text().splitlines()
    expected = [json.loads(line)["lr_used"] for line in lines]
    scheduler = OptimizerParamScheduler(Recorder(), config)
    scheduler.num_samples = 8 * (10 - len(expected))
    for value in expected:
        assert scheduler.learning_rate == pytest.approx(value, rel=1e-14)
        scheduler.step(8)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
def test_reference_models_ten_steps(name: str) -> None:
    config = ScheduleConfig(max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=3, lr_decay_steps=10, lr_decay_style="cosine")
    expected = np.load(GOLDEN / "model" / f"{name}.npz")["train/lr"]
    np.testing.assert_allclose(rates(config, *range(10)), expected, rtol=1e-12)


def test_warm_up_starts_from_its_first_rate() -> None:
    config = ScheduleConfig(max_lr=1.0, init_lr=0.2, lr_warmup_steps=40, lr_decay_steps=100)
    assert rates(config, 0, 10, 40) == pytest.approx([0.2, 0.4, 1.0])


def test_logged_run_with_skipped_iterations() -> None:
    config = ScheduleConfig(
        max_lr=1.5e-4, min_lr=1e-5, lr_warmup_steps=3200 * 16, lr_decay_steps=320_000 * 16, lr_decay_style="cosine"
    )
    assert f"{learning_rate(config, (20 - 15) * 16):.6E}" == "2.343750E-07"


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.775, 0.55, 0.1, 0.1]),
        ("cosine", [1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1, 0.1]),
        ("inverse-square-root", [1.0, math.sqrt(20 / 40), math.sqrt(20 / 60), math.sqrt(0.2), 0.1]),
    ],
)
def test_decay_styles(style: str, expected: list[float]) -> None:
    config = ScheduleConfig(max_lr=1.0, min_lr=0.1, lr_warmup_steps=20, lr_decay_steps=100, lr_decay_style=style)
    assert rates(config, 20, 40, 60, 100, 101) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.5 * (1 + math.sqrt(0.5)), 0.5),
        ("exponential", 2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_warm_up_stable_decay(style: str, quarter: float, half: float) -> None:
    config = ScheduleConfig(
        max_lr=1.1,
        min_lr=0.1,
        lr_warmup_steps=10,
        lr_decay_steps=100,
        lr_decay_style="WSD",
        wsd_decay_steps=40,
        lr_wsd_decay_style=style,
    )
    expected = [0.55, 1.1, 1.1, 1.1, 0.1 + quarter, 0.1 + half, 0.1, 0.1]
    assert rates(config, 5, 10, 35, 60, 70, 80, 100, 150) == pytest.approx(expected)


def test_schedules_of_no_length_have_values() -> None:
    assert rates(ScheduleConfig(max_lr=1.0, min_lr=0.25), 0, 7) == [0.25, 0.25]
    config = ScheduleConfig(max_lr=1.0, lr_decay_style="inverse-square-root", lr_decay_steps=9)
    assert rates(config, 0, 4) == [1.0, 0.5]
    assert rates(ScheduleConfig(max_lr=1.0, lr_warmup_steps=4, lr_decay_steps=4), 2, 4, 5) == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.3, 0.3, 0.3, 0.3]),
        ("linear", [0.1, 0.15, 0.2, 0.3]),
        ("cosine", [0.1, 0.1 + 0.1 * (1 - math.sqrt(0.5)), 0.2, 0.3]),
    ],
)
def test_weight_decay_styles(style: str, expected: list[float]) -> None:
    start = 0.3 if style == "constant" else 0.1
    config = ScheduleConfig(max_lr=1.0, start_wd=start, end_wd=0.3, wd_incr_steps=80, wd_incr_style=style)
    assert [weight_decay(config, count) for count in (0, 20, 40, 80)] == pytest.approx(expected)
    assert weight_decay(config, 1000) == 0.3


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--lr-wsd-decay-iters"):
        ScheduleConfig(max_lr=1.0, lr_decay_style="WSD")
    with pytest.raises(ConfigurationError, match=r"0\.1 and --end-weight-decay 0\.3"):
        ScheduleConfig(max_lr=1.0, start_wd=0.1, end_wd=0.3)


def test_optimizer_always_holds_the_next_iterations_values() -> None:
    recorder = Recorder()
    config = ScheduleConfig(max_lr=1.0, lr_warmup_steps=4, lr_decay_steps=8, start_wd=0.2, end_wd=0.2)
    scheduler = OptimizerParamScheduler(recorder, config)
    scheduler.step(2)
    scheduler.step(4)
    assert recorder.values == [(0.0, 0.2), (0.5, 0.2), (0.5, 0.2)]


def test_resumed_schedule_continues() -> None:
    config = ScheduleConfig(max_lr=1.0, lr_warmup_steps=4, lr_decay_steps=8)
    first = OptimizerParamScheduler(Recorder(), config)
    first.step(3)
    second = OptimizerParamScheduler(Recorder(), config)
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == ()
    assert second.num_samples == 3
    assert second.learning_rate == first.learning_rate == 0.75


def test_a_different_schedule_needs_a_choice() -> None:
    stored = ScheduleConfig(max_lr=1.0, lr_decay_steps=80)
    given = replace(stored, max_lr=0.5, lr_decay_style="cosine")
    with pytest.raises(CheckpointError, match=r"max_lr: 1\.0 → 0\.5; lr_decay_style: linear → cosine") as caught:
        reconcile_schedules(stored, given, 0, override=False, use_checkpoint=False)
    assert "--override-opt-param-scheduler" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert reconcile_schedules(stored, given, 0, override=True, use_checkpoint=False) == (
        given,
        ("max_lr: 1.0 → 0.5", "lr_decay_style: linear → cosine"),
    )
    assert reconcile_schedules(stored, given, 0, override=False, use_checkpoint=True) == (
        stored,
        ("max_lr: 0.5 → 1.0", "lr_decay_style: cosine → linear"),
    )
    with pytest.raises(ConfigurationError, match="exclude each other"):
        reconcile_schedules(stored, given, 0, override=True, use_checkpoint=True)


@pytest.mark.parametrize(
    ("style", "num_samples", "free"),
    [("constant", 8, True), ("constant", 3, False), ("WSD", 60, True), ("WSD", 61, False), ("cosine", 8, False)],
)
def test_a_schedule_that_stands_still_may_grow(style: str, num_samples: int, free: bool) -> None:
    stored = ScheduleConfig(max_lr=1.0, lr_warmup_steps=4, lr_decay_steps=80, lr_decay_style=style, wsd_decay_steps=20)
    given = replace(stored, lr_warmup_steps=8, lr_decay_steps=160)
    if not free:
        with pytest.raises(CheckpointError, match="lr_warmup_steps: 4 → 8"):
            reconcile_schedules(stored, given, num_samples, override=False, use_checkpoint=False)
        return
    taken, lines = reconcile_schedules(stored, given, num_samples, override=False, use_checkpoint=False)
    assert taken == given
    assert "lr_warmup_steps: 4 → 8" in lines
    other = replace(given, max_lr=0.5)
    assert conflicting_fields(stored, other, num_samples) == ("max_lr",)


def test_loading_applies_the_chosen_schedule() -> None:
    stored = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0, lr_decay_steps=10))
    stored.step(5)
    scheduler = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0, lr_decay_steps=20))
    lines = scheduler.load_state_dict(stored.state_dict(), override=True)
    assert lines == ("lr_decay_steps: 10 → 20",)
    assert scheduler.learning_rate == 0.75


def test_the_decoupled_rate_has_the_same_shape_between_bounds_of_its_own() -> None:
    config = ScheduleConfig(max_lr=1.0, min_lr=0.5, init_lr=0.2, lr_warmup_steps=40, lr_decay_steps=100)
    assert decoupled_learning_rate(config, 40) is None
    decoupled = replace(config, decoupled_max_lr=3.0, decoupled_min_lr=1.0)
    assert rates(decoupled, 20, 40, 70, 200) == rates(config, 20, 40, 70, 200)
    found = [decoupled_learning_rate(decoupled, count) for count in (0, 20, 40, 70, 200)]
    assert found == pytest.approx([0.2, 1.6, 3.0, 2.0, 1.0])
    assert decoupled_learning_rate(replace(decoupled, decoupled_min_lr=None), 200) == 0.5


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_weight_decay_that_rises_over_no_samples_is_the_last_one_and_over_one_the_first_at_first(style: str) -> None:
    for steps, num_samples, expected in ((0, 0, 0.3), (1, 0, 0.1), (1, 1, 0.3), (1, 2, 0.3)):
        config = ScheduleConfig(max_lr=1.0, start_wd=0.1, end_wd=0.3, wd_incr_steps=steps, wd_incr_style=style)
        assert weight_decay(config, num_samples) == pytest.approx(expected)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_a_decay_over_one_sample_starts_at_the_largest_rate(style: str) -> None:
    config = ScheduleConfig(max_lr=1.0, min_lr=0.25, lr_warmup_steps=0, lr_decay_steps=1, lr_decay_style=style)
    assert rates(config, 0, 2) == [1.0, 0.25]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("lr_decay_style", "learning-rate schedule quadratic is not registered; pass the script that registers it"),
        ("lr_wsd_decay_style", "learning-rate schedule quadratic is not registered; pass the script"),
        ("wd_incr_style", r"--weight-decay-incr-style quadratic is unknown; possible values: constant, linear, cosine"),
    ],
)
def test_a_style_of_another_program_is_rejected_by_name(field: str, message: str) -> None:
    state = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0)).state_dict()
    stored = {**state, "schedule": {**state["schedule"], field: "quadratic"}}
    with pytest.raises(ConfigurationError, match=message):
        OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0)).load_state_dict(stored, use_checkpoint=True)


def test_a_schedule_that_is_overridden_need_not_be_registered() -> None:
    scheduler = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0, lr_decay_style="cosine"))
    state = scheduler.state_dict()
    stored = {**state, "schedule": {**state["schedule"], "lr_decay_style": "restarts"}}
    with pytest.raises(CheckpointError, match="lr_decay_style: restarts → cosine"):
        scheduler.load_state_dict(stored)
    assert scheduler.load_state_dict(stored, override=True) == ("lr_decay_style: restarts → cosine",)
    with pytest.raises(ConfigurationError, match="Megatron's format cannot store --lr-decay-style restarts"):
        stored_schedule(stored)


def test_megatrons_files_reject_a_schedule_that_megatron_does_not_have() -> None:
    scheduler = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0))
    assert stored_schedule(scheduler.state_dict())["lr_decay_style"] == "linear"
    # The shapes of the last part of WSD are no decay styles of their own in Megatron.
    scheduler = OptimizerParamScheduler(Recorder(), ScheduleConfig(max_lr=1.0, lr_decay_style="minus_sqrt"))
    with pytest.raises(
        ConfigurationError, match=("Megatron's format cannot store --lr-decay-style minus_sqrt; use the native format")
    ):
        stored_schedule(scheduler.state_dict())


def test_a_schedule_of_megatrons_files_that_is_not_known_is_rejected_by_name() -> None:
    stored = {"max_lr": 1.0, "lr_decay_steps": 40, "num_steps": 8}
    assert schedule_state(stored, {})["schedule"]["lr_decay_style"] == "linear"
    with pytest.raises(
        CheckpointError, match="opt_param_scheduler: --lr-decay-style quadratic is not a style of Megatron-LM"
    ):
        schedule_state({**stored, "lr_decay_style": "quadratic"}, {})


def test_the_optimizer_has_the_values_of_a_loaded_schedule() -> None:
    config = ScheduleConfig(max_lr=1.0, lr_decay_steps=100, lr_decay_style="linear")
    first, recorder = OptimizerParamScheduler(Recorder(), config), Recorder()
    first.step(40)
    OptimizerParamScheduler(recorder, config).load_state_dict(first.state_dict())
    assert [rate for rate, _ in recorder.values] == pytest.approx([1.0, 0.6])


def test_a_registered_schedule_has_the_remaining_fraction_of_the_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_lr_schedule("square", lambda elapsed: (1.0 - elapsed) ** 2)
    config = ScheduleConfig(max_lr=1.0, min_lr=0.2, lr_warmup_steps=10, lr_decay_steps=110, lr_decay_style="square")
    rates = [learning_rate(config, num_samples) for num_samples in (0, 5, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.4, 0.2, 0.2])
    decaying = ScheduleConfig(
        max_lr=1.0, lr_decay_steps=100, wsd_decay_steps=50, lr_decay_style="WSD", lr_wsd_decay_style="square"
    )
    assert [learning_rate(decaying, num_samples) for num_samples in (25, 75)] == pytest.approx([1.0, 0.25])
    with pytest.raises(ConfigurationError, match="learning-rate schedule square is already registered"):
        register_lr_schedule("square", lambda elapsed: 0.0)
    with pytest.raises(ConfigurationError, match="learning-rate schedule cosine is built in"):
        register_lr_schedule("cosine", lambda elapsed: 0.0)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(ConfigurationError, match="learning-rate schedule square is not registered"):
        OptimizerParamScheduler(Recorder(), config)


def test_a_registered_schedule_without_a_finite_value_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_lr_schedule("endless", lambda elapsed: float("inf"))
    with pytest.raises(ConfigurationError, match="schedule endless: its value at 0"):
        learning_rate(ScheduleConfig(max_lr=1.0, lr_decay_steps=100, lr_decay_style="endless"), 50)
