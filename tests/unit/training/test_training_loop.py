"""At which iterations the training loop logs, saves, evaluates and exits, with simulated steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import parse_arguments
from megatron.core.errors import TrainingError
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.timers import Timers
from megatron.core.transformer.qk_clip import QueryKeyClip
from megatron.training import training
from megatron.training.callbacks import callback, configured, layer_statistics
from megatron.training.callbacks.callback import Callback, Callbacks, TrainingRun
from megatron.training.callbacks.configured import MetricsLog, configured_callbacks
from megatron.training.callbacks.exit_warning import ExitWarning
from megatron.training.callbacks.layer_statistics import AttentionLogits
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.callbacks.profiling import Profiling, ScheduleRecorder
from megatron.training.callbacks.progress_log import ProgressLog
from megatron.training.callbacks.stragglers import Stragglers
from megatron.training.evaluation import EvaluationRecord, EvaluationSet, EvaluationSets
from megatron.training.fault_tolerance.anomaly_detector import AnomalyDetector
from megatron.training.loggers.log_lines import LogInterval, StepReport
from megatron.training.resume import ResumeState
from megatron.training.training import evaluate_and_report, train
from megatron.training.training_step import StepReduction
from tests.unit.config.command_lines import MINIMAL

Event = tuple[Any, ...]


class Noted:
    """Note each call of any method; return what ``answers`` says of it."""

    def __init__(self, name: str, events: list[Event], **answers: Any) -> None:
        self.__dict__.update({"_called": name, "_events": events, "_answers": answers})

    def __getattr__(self, method: str) -> Callable[..., Any]:
        mine = self.__dict__

        def call(*arguments: Any, **named: Any) -> Any:
            mine["_events"].append((f"{mine['_called']}.{method}", *arguments))
            answer = mine["_answers"].get(method)
            return answer(*arguments) if callable(answer) else answer

        return call


def noted(kind: type[Callback], name: str, events: list[Event], **answers: Any) -> Any:
    """Return a callback of this class that notes each call of a method of its own, and has the moments as they are."""
    notes = Noted(name, events, **answers)
    own = [each for each, value in vars(kind).items() if callable(value) and is_own(each)]
    stubs = {each: staticmethod(getattr(notes, each)) for each in own}
    made = type(kind.__name__, (kind,), stubs)
    return made.__new__(made)


def is_own(method: str) -> bool:
    return not method.startswith("_") and not hasattr(Callback, method)


def report_of(iteration: int, consumed: int, batch_size: int, is_skipped: bool = False) -> StepReport:
    return StepReport(
        iteration=iteration,
        consumed_samples=consumed,
        global_batch_size=batch_size,
        num_tokens=1.0,
        lm_loss=float(iteration),
        learning_rate=0.1,
        next_learning_rate=0.1,
        loss_scale=1.0,
        next_loss_scale=1.0,
        grad_norm=None,
        num_zeros=None,
        params_norm=None,
        is_skipped=is_skipped,
        step_time_s=2.0,
        tokens_per_second=1.0,
        tflops_per_device=1.0,
        mfu=None,
        sample_ids_hash=None,
    )


class Loop:
    """A run whose steps are made up; ``events`` are the calls of its parts, and ``lines`` what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str, world_size: int = 1) -> None:
        config = parse_arguments([*MINIMAL, "--eval-iters", "0", *words], world_size)
        self.events: list[Event] = []
        self.lines: list[str] = []
        self.skipped: set[int] = set()
        self.agreement = {0: StepReduction(1.0, 1.0, False, False)}
        self.source = Noted("source", self.events)
        self.source.__dict__["data_sets"] = ("a", "b")
        self.observer: Callable[[], None] | None = None
        self.parts: Any = SimpleNamespace(
            chunks=[], ddp_chunks=[], optimizer=SimpleNamespace(loss_scale=1.0), qk_clip=None
        )
        checkpoints = Noted("checkpoints", self.events, save=True)
        checkpoints.__dict__["last_seconds"] = None
        device = Noted("device", self.events, pinned_bytes=None)
        runtime: Any = SimpleNamespace(
            device=device, state=describe_parallel_state(0, 1), flight=FlightRecorder(), is_reporter=True
        )
        self.run = TrainingRun(
            config=config,
            runtime=runtime,
            parts=self.parts,
            forward_step=None,  # type: ignore[arg-type]
            train_state=TrainState(),
            evaluation_sets=EvaluationSets((), ()),
            counter=None,
            metrics=Noted("metrics", self.events),  # type: ignore[arg-type]
            timers=Timers(),
            checkpoints=checkpoints,  # type: ignore[arg-type]
            callbacks=Callbacks(),
            step_timers=Timers(),
            action_clock=lambda actions: None,
            log_interval=LogInterval(config.logging.log_interval, config.train_iters, config.train_iters),
            last_iteration=config.train_iters,
        )
        monkeypatch.setattr(training, "TrainingStep", self.make_step)
        for module in (training, callback):
            monkeypatch.setattr(module, "print_line", self.lines.append)
        monkeypatch.setattr(training, "format_memory", lambda *figures: f"memory after {figures[:2]} {figures[3]}")
        monkeypatch.setattr(training, "_log_model_size", lambda run: self.lines.append("model size"))
        monkeypatch.setattr(training, "agree_to_exit", self.agree_to_exit)

    def make_step(self, config: object, runtime: object, parts: object, forward_step: object, *others: Any) -> object:
        assert (config, runtime, parts) == (self.run.config, self.run.runtime, self.run.parts)
        timers, self.observer, _, guard, data_sets = others
        assert (timers, guard, data_sets) == (self.run.step_timers, self.run.guard, ("a", "b"))
        return SimpleNamespace(run=self.step, overlaps_results=False)

    def agree_to_exit(self, request: object, runtime: object) -> StepReduction:
        assert (request, runtime) == (None, self.run.runtime)
        return self.agreed()

    def agreed(self) -> StepReduction:
        return self.agreement.get(self.run.train_state.iteration, self.agreement[0])

    def step(
        self, state: TrainState, source: object, batch_size: int, exit_request: object
    ) -> tuple[StepReport, StepReduction]:
        assert source is self.source
        assert exit_request is None
        if self.observer is not None:
            self.observer()
        state.iteration += 1
        state.consumed_train_samples += batch_size
        is_skipped = state.iteration in self.skipped
        return report_of(state.iteration, state.consumed_train_samples, batch_size, is_skipped), self.agreed()

    def note(self, kind: type[Callback], name: str, **answers: Any) -> Any:
        """Return a callback of this class whose own methods are noted."""
        return noted(kind, name, self.events, **answers)

    def train(
        self,
        *,
        live: LiveLine | None = None,
        stragglers: Stragglers | None = None,
        progress: ProgressLog | None = None,
        continuation: ResumeState | None = None,
        own: Sequence[Callback] = (),
        **changes: Any,
    ) -> str | None:
        self.run = replace(self.run, **changes)
        recorder = self.note(ScheduleRecorder, "recorder")
        recorder._path = None
        callbacks = configured_callbacks(
            self.run.config,
            self.run.runtime,
            self.parts,
            profiling=self.note(Profiling, "profiling"),
            recorder=recorder,
            live=self.note(LiveLine, "live") if live is None else live,
            stragglers=stragglers,
            guard=self.run.guard,
            progress=progress,
            continuation=continuation,
            own=own,
        )
        self.run = replace(self.run, callbacks=callbacks)
        return train(self.run, self.source, None)  # type: ignore[arg-type]

    def of(self, name: str) -> list[Event]:
        """Return the arguments of each call of one method."""
        return [event[1:] for event in self.events if event[0] == name]

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


Make = Callable[..., Loop]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *words, **world: Loop(monkeypatch, *words, **world)


def test_each_iteration_is_profiled_noted_and_written_down(make: Make) -> None:
    loop = make("--train-iters", "3", "--tensorboard-log-interval", "2", "--log-interval", "9")
    loop.skipped = {2}
    guard = loop.note(AnomalyDetector, "guard", passes_over=None)
    assert loop.train(guard=guard) is None
    assert loop.of("profiling.begin_iteration") == [(0, []), (1, []), (2, [])]
    for name in ("profiling.end_iteration", "recorder.end_iteration"):
        assert loop.of(name) == [(1,), (2,), (3,)]
    assert loop.of("checkpoints.note_step") == [(1, True), (2, False), (3, True)]
    assert len(loop.of("checkpoints.poll")) == 3
    assert [report.iteration for (report,) in loop.of("live.step")] == [1, 2, 3]
    assert [report.iteration for (report,) in loop.of("guard.accepted")] == [1, 3]
    assert [report.iteration for (report,) in loop.of("metrics.write_step")] == [1, 2, 3]
    assert [report.iteration for (report,) in loop.of("metrics.step_scalars")] == [2]
    assert loop.of("guard.passes_over") == [(0, 0, 2), (1, 2, 2), (2, 4, 2)]
    flight = loop.run.runtime.flight
    assert (flight.iteration, flight.iterations_done, flight.longest_step_s) == (3, 3, 2.0)
    assert loop.of("checkpoints.finish") == [()]


@pytest.mark.parametrize(
    ("interval", "memory_interval", "logged", "with_memory"),
    [
        (2, None, [2, 4], [2]),
        (1, None, [1, 2, 3, 4, 5], [1]),
        (2, 3, [2, 4], [2, 3]),
        (9, None, [], []),
        (2, 4, [2, 4], [2, 4]),
    ],
)
def test_lines_come_at_their_intervals_and_of_the_first_iteration(
    make: Make, interval: int, memory_interval: int | None, logged: list[int], with_memory: list[int]
) -> None:
    further = [] if memory_interval is None else ["--log-memory-interval", str(memory_interval)]
    loop = make("--train-iters", "5", "--log-interval", str(interval), *further)
    guard = loop.note(AnomalyDetector, "guard", passes_over=None)
    loop.train(guard=guard)
    first = [] if interval == 1 else [1]
    assert [count for count in range(1, 6) if loop.count(f"iteration {count:8d}/")] == sorted({*first, *logged})
    assert [count for count in range(1, 6) if loop.count(f"memory after (0, {count}) False")] == with_memory
    # The closed form is printed with the memory of a logged iteration.
    assert loop.count("model size") == len(set(with_memory) & set(logged))
    assert len(loop.of("guard.log_variation")) == len(logged)
    averages = [line.partition("lm loss: ")[2][:12] for line in loop.lines if f"iteration {2:8d}/" in line]
    assert averages == ([] if 2 not in logged else ["2.000000E+00"] if interval == 1 else ["1.500000E+00"])
    if interval == 2:
        # An average begins anew behind each line.
        (line,) = (line for line in loop.lines if f"iteration {4:8d}/" in line)
        assert "lm loss: 3.500000E+00" in line


def test_the_device_memory_is_told_where_it_is_asked_for(make: Make) -> None:
    loop = make("--train-iters", "1", "--log-interval", "1", "--log-device-memory-used")
    loop.train()
    assert loop.count("memory after (0, 1) True") == 1


@pytest.mark.parametrize(
    ("words", "saved"),
    [
        (["--save", "x", "--save-interval", "2"], [2, 4, 5]),
        (["--save", "x", "--save-interval", "5"], [5]),
        (["--save", "x"], [5]),
        ([], []),
    ],
)
def test_checkpoints_are_saved_at_intervals_and_at_the_end(make: Make, words: list[str], saved: list[int]) -> None:
    loop = make("--train-iters", "5", *words)
    found: list[int] = []

    def save(state: TrainState) -> bool:
        found.append(state.iteration)
        return True

    checkpoints = Noted("checkpoints", loop.events, save=save)
    checkpoints.__dict__["last_seconds"] = None
    progress = loop.note(ProgressLog, "progress")
    loop.train(checkpoints=checkpoints, progress=progress)
    assert found == saved
    assert loop.of("progress.save") == [(loop.run.train_state,)] * len(saved)
    assert loop.count("save-checkpoint") == len(saved)
    assert loop.events[-1][0] == "checkpoints.finish"


def test_progress_is_not_written_of_a_checkpoint_that_was_not_saved(make: Make) -> None:
    loop = make("--train-iters", "1", "--save", "x")
    checkpoints = Noted("checkpoints", loop.events, save=False)
    checkpoints.__dict__["last_seconds"] = None
    loop.train(checkpoints=checkpoints, progress=loop.note(ProgressLog, "progress"))
    assert len(loop.of("checkpoints.save")) == 1
    assert loop.of("progress.save") == []


@pytest.mark.parametrize(
    ("words", "agreement", "reason"),
    [
        ((), StepReduction(1.0, 1.0, True, False), "exiting program at iteration 2 after a signal"),
        (
            ("--exit-duration-in-mins", "7"),
            StepReduction(1.0, 1.0, False, True),
            "exiting program after 7 minutes at iteration 2",
        ),
        (("--exit-interval", "2"), None, "exiting program at iteration 2"),
    ],
)
def test_a_run_that_ends_early_saves_and_says_why(
    make: Make, words: tuple[str, ...], agreement: StepReduction | None, reason: str
) -> None:
    loop = make("--train-iters", "5", "--save", "x", *words)
    if agreement is not None:
        loop.agreement[2] = agreement
    assert loop.train() == reason
    assert loop.run.train_state.iteration == 2
    assert len(loop.of("checkpoints.save")) == 1


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the iterations after which the run is evaluated."""
    found: list[int] = []
    monkeypatch.setattr(training, "evaluate_and_report", lambda run, sets: found.append(run.train_state.iteration))
    return found


@pytest.mark.parametrize(
    ("words", "expected", "num_left_out"),
    [((), [2, 4], 0), (("--save", "x", "--preemption-grace-seconds", "60"), [2], 1)],
)
def test_evaluations_come_at_intervals_and_not_where_a_signal_leaves_no_time(
    make: Make, evaluated: list[int], words: tuple[str, ...], expected: list[int], num_left_out: int
) -> None:
    loop = make("--train-iters", "5", "--eval-interval", "2", *words)
    loop.agreement[4] = StepReduction(1.0, 1.0, True, False)
    sets = tuple(EvaluationSet(name, name, 6, 1, nullcontext, 6) for name in "ab")  # type: ignore[arg-type]
    assert loop.train(evaluation_sets=EvaluationSets(sets, ())) is not None
    assert evaluated == expected
    assert loop.run.train_state.consumed_valid_samples == 12 * num_left_out
    assert loop.count("no evaluation at iteration 4: the run is ending after a signal") == num_left_out


def test_with_time_for_it_an_evaluation_is_not_left_out(make: Make, evaluated: list[int]) -> None:
    loop = make("--train-iters", "4", "--eval-interval", "2", "--save", "x", "--preemption-grace-seconds", "60")
    loop.train()
    assert evaluated == [2, 4]


@pytest.mark.parametrize("seconds", [None, 0.5, 61.0])
def test_a_checkpoint_that_takes_longer_than_a_signal_leaves_is_told_once(make: Make, seconds: float | None) -> None:
    loop = make("--train-iters", "3", "--save", "x", "--preemption-grace-seconds", "60")
    loop.run.checkpoints.__dict__["last_seconds"] = seconds
    loop.train()
    assert loop.count("WARNING: from a signal to a complete checkpoint") == (seconds == 61.0)


def test_the_wait_for_a_signal_counts_from_iteration_to_iteration(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    loop = make("--train-iters", "3")
    monkeypatch.setattr(ExitWarning, "look", lambda warning: looks.append(loop.run.train_state.iteration))
    loop.train()
    assert looks == [1, 2, 3]


@pytest.mark.parametrize(("level", "count"), [(0, 0), (1, 3), (2, 3)])
def test_unused_memory_is_emptied_after_each_iteration_from_level_1_on(make: Make, level: int, count: int) -> None:
    loop = make("--train-iters", "3", "--empty-unused-memory-level", str(level))
    loop.train()
    assert len(loop.of("device.empty_cache")) == count


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name in ("collect", "disable"):
        monkeypatch.setattr(gc, name, lambda name=name: found.append(name))
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), []),
        (("--manual-gc",), ["disable", "collect"]),
        (("--manual-gc", "--manual-gc-interval", "2"), ["disable", "collect", "collect", "collect"]),
    ],
)
def test_garbage_is_collected_by_hand_where_that_is_asked_for(
    make: Make, collections: list[str], words: tuple[str, ...], expected: list[str]
) -> None:
    make("--train-iters", "5", *words).train()
    assert collections == expected


def test_samples_that_the_guard_leaves_out_are_passed_over(make: Make) -> None:
    loop = make("--train-iters", "3", "--micro-batch-size", "1", "--global-batch-size", "6", world_size=2)
    guard = loop.note(
        AnomalyDetector,
        "guard",
        passes_over=lambda iteration, first, size: "known to be bad" if iteration == 1 else None,
    )
    assert loop.train(guard=guard) is None
    assert loop.of("guard.passes_over") == [(0, 0, 6), (1, 6, 6), (2, 12, 6)]
    assert len(loop.of("source.next")) == 3
    state = loop.run.train_state
    assert (state.iteration, state.consumed_train_samples, state.skipped_iterations) == (3, 18, 1)
    assert loop.count("iteration 2: consumed samples 6 to 12 are skipped: known to be bad") == 1
    assert loop.of("profiling.begin_iteration") == [(0, []), (2, [])]
    assert len(loop.of("checkpoints.poll")) == 3
    ((written,),) = loop.of("metrics.write")
    assert written == {
        "iteration": 2,
        "consumed_samples": 12,
        "lm_loss": None,
        "skipped": True,
        "left_out": "known to be bad",
        "global_batch_size": 6,
    }


def test_a_signal_is_seen_where_samples_are_passed_over(make: Make) -> None:
    loop = make("--train-iters", "3")
    loop.agreement[1] = StepReduction(0.0, 0.0, True, False)
    guard = loop.note(AnomalyDetector, "guard", passes_over="bad")
    assert loop.train(guard=guard, metrics=None) == "exiting program at iteration 1 after a signal"
    assert loop.run.runtime.flight.iteration == 1


def test_nothing_is_logged_of_what_was_given_up(make: Make) -> None:
    loop = make("--train-iters", "3", "--log-interval", "1")
    loop.run.runtime.flight.give_up()
    with pytest.raises(GivenUpError):
        loop.train()
    assert loop.lines == []
    assert loop.of("metrics.write_step") == []


def test_stragglers_are_reported_with_the_logged_iterations(make: Make) -> None:
    loop = make("--train-iters", "4", "--log-interval", "2")
    found = SimpleNamespace(
        figures=lambda: {"slowest": 1}, line=lambda count: f"stragglers of {count}", scalars=lambda: {"a": 1.0}, last=7
    )
    stragglers = loop.note(Stragglers, "stragglers", report=lambda iteration: found)
    loop.train(stragglers=stragglers)
    assert loop.of("stragglers.end_iteration") == [(1,), (2,), (3,), (4,)]
    assert loop.of("stragglers.report") == [(2,), (4,)]
    assert loop.count("stragglers of ") == 2
    assert loop.of("metrics.scalars") == [({"a": 1.0}, 7)] * 2
    reports = [report for (report,) in loop.of("metrics.write_step")]
    assert [report.stragglers for report in reports] == [None, {"slowest": 1}, None, {"slowest": 1}]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_restart_is_prepared_after_each_iteration(make: Make, is_copied: bool) -> None:
    loop = make("--train-iters", "2")
    continuation = loop.note(ResumeState, "continuation", is_copied=is_copied)
    history = SimpleNamespace(to_dict=lambda: {"read": 1})
    counter = Noted("counter", loop.events, history_at=history)
    loop.train(continuation=continuation, counter=counter)
    assert loop.of("continuation.is_copied") == [(1,), (2,)]
    assert loop.of("continuation.end_iteration") == [(loop.run.checkpoints, loop.run.train_state)] * 2
    assert (loop.run.train_state.train_data == {"read": 1}) == is_copied


def test_what_was_read_and_left_out_is_saved(make: Make) -> None:
    loop = make("--train-iters", "1", "--save", "x")
    counter = Noted("counter", loop.events, history_at=SimpleNamespace(to_dict=lambda: {"read": 1}))
    guard = loop.note(AnomalyDetector, "guard", passes_over=None)
    guard.left_out = SimpleNamespace(to_dict=lambda: {"left": 2})
    loop.train(counter=counter, guard=guard)
    assert loop.run.train_state.train_data == {"read": 1, "left": 2}
    loop.run.train_state.train_data = None
    guard.left_out = SimpleNamespace(to_dict=dict)
    loop.run.callbacks.before_save(replace(loop.run, counter=None))
    assert loop.run.train_state.train_data is None


@pytest.mark.parametrize(("interval", "compared"), [(None, []), (2, [2, 4])])
def test_replicas_are_compared_at_intervals(
    make: Make, monkeypatch: pytest.MonkeyPatch, interval: int | None, compared: list[int]
) -> None:
    words = [] if interval is None else ["--check-weight-hash-across-dp-replicas-interval", str(interval)]
    loop = make("--train-iters", "4", *words)
    chunk, found = Noted("chunk", loop.events), []

    def check(parameters: Sequence[object], state: object) -> None:
        assert (parameters, state) == ([], loop.run.runtime.state)
        found.append(loop.run.train_state.iteration)
        if len(found) > 1:
            raise TrainingError("two of them differ")

    monkeypatch.setattr(configured, "check_replicas_equal", check)
    loop.run.parts.ddp_chunks.append(chunk)  # type: ignore[attr-defined]
    if interval is None:
        loop.train()
    else:
        with pytest.raises(TrainingError, match="at iteration 4: two of them differ"):
            loop.train()
    assert found == compared
    assert len(loop.of("chunk.finish_param_gather")) == len(compared)


def test_times_are_logged_over_the_interval(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make("--train-iters", "2", "--log-interval", "2", "--timing-log-level", "1", "--log-timers-to-tensorboard")
    now = 0.0
    timers = Timers(1, clock=lambda: now)
    with timers("optimizer", log_level=1):
        now = 0.001
    monkeypatch.setattr(timers, "gather", lambda *rest, gather=timers.gather, **named: [*gather(*rest, **named), {}])
    loop.train(timers=timers)
    assert loop.of("metrics.scalars") == [({"optimizer-time": 0.0005}, 2)]
    assert loop.count("(0.50, 0.50)") == 1


def test_times_are_figures_only_where_that_is_asked_for(make: Make) -> None:
    loop = make("--train-iters", "1", "--log-interval", "1", "--timing-log-level", "1")
    loop.train()
    assert loop.of("metrics.scalars") == []
    make("--train-iters", "1", "--log-interval", "1", "--timing-log-level", "1").train(metrics=None)


@pytest.mark.parametrize(("interval", "measured"), [(2, [2, 4]), (9, [])])
def test_attention_logits_are_kept_in_the_iterations_that_are_logged(
    make: Make, monkeypatch: pytest.MonkeyPatch, interval: int, measured: list[int]
) -> None:
    loop = make("--train-iters", "4", "--log-interval", str(interval), "--log-max-attention-logit")

    def make_logits(chunks: object, device: object) -> AttentionLogits:
        assert (chunks, device) == ([], "the device")
        logits: AttentionLogits = loop.note(AttentionLogits, "logits", take=8.0)
        logits._device = torch.device("cpu")
        return logits

    loop.run.runtime.device.__dict__["torch_device"] = "the device"
    monkeypatch.setattr(configured, "AttentionLogits", make_logits)
    loop.train()
    assert loop.of("logits.take") == [(loop.run.runtime.state.world,)] * len(measured)
    found = [report.iteration for (report,) in loop.of("metrics.write_step") if report.max_attention_logit == 8.0]
    assert found == measured


def test_attention_logits_that_are_clipped_are_logged(make: Make) -> None:
    loop = make("--train-iters", "4", "--log-interval", "2")
    loop.run.runtime.device.__dict__["torch_device"] = torch.device("cpu")
    loop.run.parts.qk_clip = loop.note(QueryKeyClip, "clip", largest=8.0)
    loop.train()
    found = [report.iteration for (report,) in loop.of("metrics.write_step") if report.max_attention_logit == 8.0]
    assert found == [2, 4]


def test_gradients_are_not_observed_by_default(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make("--train-iters", "2", "--log-interval", "1")
    observed: list[str] = []
    for module, name in (
        (layer_statistics, "measure_layer_norms"),
        (configured, "compare_over_replicas"),
        (configured, "check_replicas_equal"),
    ):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: observed.append(name))
    loop.train()
    assert loop.observer is not None
    assert observed == []
    assert not [each for each in loop.run.callbacks.callbacks if isinstance(each, AttentionLogits)]


def test_norms_of_layers_are_logged_at_their_interval(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make("--train-iters", "4", "--log-layer-norms", "2", "--log-interval", "9")
    measured: list[Event] = []

    def measure(*arguments: Any) -> str:
        measured.append((loop.run.train_state.iteration, *arguments))
        return "norms"

    monkeypatch.setattr(layer_statistics, "measure_layer_norms", measure)
    monkeypatch.setattr(layer_statistics, "format_layer_norms", lambda number, norms: f"{norms} of iteration {number}")
    monkeypatch.setattr(layer_statistics, "layer_norm_scalars", lambda norms: {norms: 1.0})
    loop.train()
    assert measured == [(done, [], 2, loop.run.runtime.state, 1.0) for done in (1, 3)]
    assert [line for line in loop.lines if "norms" in line] == ["norms of iteration 2", "norms of iteration 4"]
    assert loop.of("metrics.scalars") == [({"norms": 1.0}, 2), ({"norms": 1.0}, 4)]
    loop = make("--train-iters", "2", "--log-layer-norms", "2")
    loop.run.runtime.flight.give_up()
    with pytest.raises(GivenUpError):
        loop.train(train_state=TrainState(iteration=1), metrics=None)
    assert loop.lines == []


def test_gradients_are_compared_at_their_interval(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make("--train-iters", "4", "--check-gradient-hash-across-dp-replicas-interval", "2")
    compared: list[Event] = []

    def compare(*arguments: Any) -> str:
        compared.append(arguments)
        return "" if len(compared) == 1 else "two of them differ"

    monkeypatch.setattr(configured, "compare_over_replicas", compare)
    part = SimpleNamespace(spec="spec", gradient="gradient")
    loop.run.parts.ddp_chunks.append(SimpleNamespace(shards=[part]))  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="at iteration 4: two of them differ"):
        loop.train()
    assert compared == [([("spec", "gradient")], loop.run.runtime.state, "gradients")] * 2
    assert loop.run.train_state.iteration == 3


@pytest.mark.parametrize(("num_counted", "lines"), [(12, ["sizes\nmemory"]), (11, [])])
def test_the_theoretical_memory_is_told_where_the_closed_form_counts_this_model(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_counted: int, lines: list[str]
) -> None:
    log_model_size = training._log_model_size
    loop = make()
    loop.run.parts.chunks.append(torch.nn.Linear(3, 3))  # type: ignore[attr-defined]
    monkeypatch.setattr(training, "model_size", lambda config: SimpleNamespace(shards=[num_counted, 7]))
    monkeypatch.setattr(training, "describe_theoretical_memory", lambda config: ["sizes", "memory"])
    log_model_size(loop.run)
    assert loop.lines == lines


def evaluation_set(name: str, num_microbatches: int, num_advanced: int) -> EvaluationSet:
    num_samples, opened = 2 * num_microbatches, partial(nullcontext, None)
    return EvaluationSet(name, f"{name} set", num_samples, num_microbatches, opened, num_advanced)  # type: ignore[arg-type]


def test_the_time_of_an_evaluation_is_estimated_from_what_was_measured(make: Make) -> None:
    record, sets = EvaluationRecord(), [evaluation_set("a", 5, 0), evaluation_set("b", 1, 0)]
    assert record.estimate_s(sets) is None
    loop = make("--train-iters", "1", "--micro-batch-size", "1", "--global-batch-size", "4")
    loop.train(evaluations=record)
    # A step of 2 s has four micro-batches, and a forward pass is a third of it.
    assert record.estimate_s(sets) == pytest.approx(6 * 2.0 / 4 / 3)
    record.add(2, 5.0)
    assert record.estimate_s(sets) == 15.0


@pytest.mark.parametrize("is_verbose", [False, True])
def test_an_evaluation_is_reported_set_by_set(make: Make, monkeypatch: pytest.MonkeyPatch, is_verbose: bool) -> None:
    loop = make("--micro-batch-size", "1", "--global-batch-size", "4", world_size=2)

    def evaluate(config: object, runtime: object, *others: Any) -> list[tuple[str, str, float]]:
        assert (config, runtime) == (loop.run.config, loop.run.runtime)
        count, begin = others[-2:]
        for microbatch in range(count):
            begin(microbatch)
        return [("", "", 1.0), ("_ema", " (averaged)", 2.0)]

    monkeypatch.setattr(training, "evaluate_weights", evaluate)
    loop.run.train_state.iteration = 7
    shown: list[tuple[int, int]] = []
    callbacks = Callbacks([MetricsLog()])
    run = replace(loop.run, callbacks=callbacks, show_progress=lambda done, total: shown.append((done, total)))
    sets = [evaluation_set("valid", 5, 10), evaluation_set("extra", 2, 0)]
    if is_verbose:
        evaluate_and_report(run, sets, is_verbose=True)
    else:
        evaluate_and_report(run, sets)
    assert run.train_state.consumed_valid_samples == 10
    assert shown == [(done, count) for count in (5, 2) for done in range(count)]
    written = [row for (row,) in loop.of("metrics.write")]
    assert written == [
        {"iteration": 7, "split": split, "lm_loss": loss}
        for split, loss in (("valid", 1.0), ("valid_ema", 2.0), ("extra", 1.0), ("extra_ema", 2.0))
    ]
    assert [scalars[:2] for scalars in loop.of("metrics.evaluation_scalars")] == [
        (row["split"], row["lm_loss"]) for row in written
    ]
    assert loop.count("iteration 7 on valid set (averaged)") == 1
    assert loop.count("    evaluate ") == 2
    told = [line for line in loop.lines if line.startswith("Evaluating")]
    expected = ["on 10 samples", "iter 1/3", "iter 2/3", "iter 3/3", "on 4 samples", "iter 1/1"]
    assert told == ([f"Evaluating {line}" for line in expected] if is_verbose else [])


def test_ranks_that_do_not_report_print_their_memory_only(make: Make) -> None:
    loop = make("--train-iters", "1", "--log-interval", "1")
    loop.run.runtime.is_reporter = False  # type: ignore[misc]
    loop.train()
    assert loop.lines == ["memory after (0, 1) False"]
