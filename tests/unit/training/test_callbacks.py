"""What a caller's own callbacks see of a run, and what they may change."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron.core import registry
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.training import register_callback
from megatron.training.callbacks.callback import Callback, Callbacks
from megatron.training.callbacks.configured import registered_callbacks, reject_evaluations
from megatron.training.exit_reason import launch_environment_or_exit, parse_arguments_or_exit
from megatron.training.loggers.log_lines import StepReport
from megatron.training.preflight import prepare_data_or_exit
from megatron.training.pretraining import pretrain_from_config
from tests.harness.distributed import run_distributed
from tests.unit.config.command_lines import MINIMAL

MOMENTS = [name for name, value in vars(Callback).items() if inspect.isfunction(value)]


class Watching(Callback):
    """Note each moment with the iterations done, and take part where a moment allows it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in MOMENTS:
            return found

        def moment(run: Any, *rest: Any) -> Any:
            self.seen.append((name, run.train_state.iteration))
            return found(run, *rest)

        return moment

    def reason_to_skip(self, run: Any, batch_size: int) -> str | None:
        return "it is the third" if run.train_state.iteration == 2 else None

    def measure(self, run: Any, report: StepReport) -> StepReport:
        return replace(report, auxiliary={**report.auxiliary, "own figure": 0.5 * report.iteration})


class Failing(Callback):
    """End the run after its second step."""

    iterations = 0

    def after_step(self, run: Any, report: StepReport) -> None:
        self.iterations += 1
        if report.iteration == 2:
            raise TrainingError("this is enough")


def run_with(callbacks: list[Callback], *words: str) -> int:
    launch = launch_environment_or_exit()
    config = parse_arguments_or_exit([*MINIMAL, *words], launch.world_size, launch.rank)
    tokenizer = prepare_data_or_exit(config, launch, pretrain_gpt.provide_datasets)
    own = (pretrain_gpt.provide_model, pretrain_gpt.provide_datasets, pretrain_gpt.forward_step)
    with patch("megatron.training.pretraining.shut_down"):  # the process group is the test's
        return pretrain_from_config(config, launch, tokenizer, *own, callbacks=callbacks)


def watched_run(folder: str) -> list[tuple[str, int]]:
    watching = Watching()
    words = ["--train-iters", "4", "--log-interval", "2", "--eval-interval", "2", "--eval-iters", "1"]
    files = ["--save", folder, "--metrics-jsonl", f"{folder}/metrics.jsonl"]
    assert run_with([watching], *words, *files, "--save-interval", "2") == 0
    return watching.seen


def test_a_callers_callback_sees_the_moments_in_order_and_adds_a_figure(tmp_path: Path) -> None:
    (seen,) = run_distributed(1, watched_run, str(tmp_path / "run"))
    begun, done = ("before_step", "on_gradients"), ("measure", "after_step")
    logged = (*done, "on_log", "after_evaluation", "evaluate", "before_save", "after_save", "after_iteration")
    assert seen == [
        ("on_begin", 0),
        *[("reason_to_skip", 0), *((name, 0) for name in begun), *((name, 1) for name in done)],
        *[("evaluate", 1), ("after_iteration", 1)],
        *[
            ("reason_to_skip", 1),
            *((name, 1) for name in begun),
            *((name, 2) for name in logged),
        ],
        *[("reason_to_skip", 2), ("after_skip", 3), ("evaluate", 3), ("after_iteration", 3)],
        *[
            ("reason_to_skip", 3),
            *((name, 3) for name in begun),
            *((name, 4) for name in logged),
        ],
        # The test set is evaluated when training has ended.
        *[("on_end", 4), ("after_evaluation", 4)],
    ]
    assert {name for name, _ in seen} == set(MOMENTS)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = {line["iteration"]: line.get("own figure") for line in lines if "split" not in line}
    assert figures == {1: 0.5, 2: 1.0, 3: None, 4: 2.0}


def test_a_callback_that_evaluates_is_rejected_with_overlapped_results() -> None:
    class Measuring(Callback):
        def after_step(self, run: Any, report: StepReport) -> None: ...

    class Evaluating(Callback):
        def evaluate(self, run: Any) -> None: ...

    reject_evaluations([Measuring()])
    with pytest.raises(ConfigurationError, match=r"Evaluating\.evaluate must run before the next iteration"):
        reject_evaluations([Measuring(), Evaluating()])


def failed_run() -> tuple[int, int]:
    failing = Failing()
    return run_with([failing], "--train-iters", "4", "--eval-iters", "0"), failing.iterations


def test_a_callback_that_fails_ends_the_run() -> None:
    assert run_distributed(1, failed_run) == [(1, 2)]


def test_several_callbacks_are_called_at_every_moment() -> None:
    assert [name for name, value in vars(Callbacks).items() if inspect.isfunction(value)][1:] == MOMENTS


def test_a_registered_function_must_return_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_callback("watching", Watching)
    register_callback("wrong", lambda: "x")  # type: ignore[arg-type, return-value]
    assert [type(callback) for callback in registered_callbacks(("watching", "watching"))] == [Watching, Watching]
    with pytest.raises(ConfigurationError, match="callback wrong is str, not a subclass of"):
        registered_callbacks(("wrong",))
