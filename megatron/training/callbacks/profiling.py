"""Profiling: traces of selected iterations, memory history, and the timeline of the pipeline schedule."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from megatron.config import RunConfig
from megatron.config.checks import NO_PROFILE_FOLDER
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError
from megatron.core.models import Model
from megatron.core.pipeline_parallel import Action, RankTimeline, gather_timeline, write_timeline
from megatron.core.timers import Timer, Timers
from megatron.training import Runtime
from megatron.training.callbacks.callback import ActionClock, Callback, TrainingRun
from megatron.training.loggers import StepReport

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")


class Profiling(Callback):
    """Profiler of the iterations of ``--profile``, and recorder of the memory history if requested.

    Only profiled iterations open ranges; other iterations only check whether they are profiled. Create it before the
    model, so that the history includes the model's memory, and close it at the end of the run in any case.

    Raises:
        ConfigurationError: there is no folder for the trace. Every rank raises it.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> None:
        self._options = config.logging
        self._runtime = runtime
        is_chosen = runtime.state.rank in self._options.profile_ranks
        self._is_due = self._options.profile and is_chosen
        self._records_memory = self._options.record_memory_history and is_chosen and runtime.device.is_cuda
        self._uses_torch = self._options.use_pytorch_profiler or not runtime.device.is_cuda
        self._folder = config.profile_folder
        self._log = log
        self._is_reached = False
        self._open = ExitStack()
        self._first_iteration: int | None = None
        self._last_iteration: int | None = None
        if self._options.profile and self._uses_torch and self._folder is None:
            raise ConfigurationError(NO_PROFILE_FOLDER)
        if self._options.profile and not runtime.device.is_cuda and not self._options.use_pytorch_profiler:
            log("--profile: nsys and NVTX ranges need CUDA; on this CPU torch's profiler is used")
        if self._options.record_memory_history and not runtime.device.is_cuda:
            log("--record-memory-history has no effect on a CPU: only CUDA memory has a history")
        if self._records_memory:
            runtime.device.record_memory_history()

    @property
    def is_open(self) -> bool:
        return self._first_iteration is not None

    def before_step(self, run: TrainingRun) -> None:
        self.begin_iteration(run.train_state.iteration, run.parts.chunks)

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        self.end_iteration(report.iteration)
        return report

    def begin_iteration(self, done: int, chunks: Sequence[Model]) -> None:
        """Start the profile if its first iteration is next, after ``done`` iterations."""
        is_named = self._options.profile_step_start <= done < self._options.profile_step_end
        self._is_reached |= is_named
        if self._is_due and not self.is_open and is_named:
            self._first_iteration = done + 1
            self._begin(chunks)

    def end_iteration(self, done: int) -> None:
        """End the profile if ``done`` is its last iteration."""
        if self.is_open and done >= self._options.profile_step_end:
            self._end(done)

    def timers(self, timers: Timers) -> Timers:
        """Wrap a step's timers so that they also open ranges in profiled iterations."""
        return _RangedTimers(timers, self) if self._is_due else timers

    def action_clock(self, actions: Sequence[Action]) -> Callable[[], float] | None:
        """Return a clock that opens a range for each action of the executor, or None outside of profiled iterations."""
        return _ActionRanges(actions) if self.is_open else None

    def close(self) -> None:
        """Write the recorded data; print a warning for a file that cannot be written.

        If the run had none of the iterations, a line says so.
        """
        if self.is_open:
            self._end(None)
        if self._options.profile and not self._is_reached:
            self._is_reached = True
            first, last = self._options.profile_step_start + 1, self._options.profile_step_end
            self._log(f"--profile: nothing was profiled: the run did not reach iterations {first} to {last}")
        if self._records_memory:
            self._records_memory = False
            path = Path(self._options.memory_snapshot_path)
            if len(self._options.profile_ranks) > 1:
                path = path.with_name(f"{path.stem}-rank{self._runtime.state.rank}{path.suffix}")
            self._write(path, lambda: self._runtime.device.save_memory_history(str(path)))

    def _begin(self, chunks: Sequence[Model]) -> None:
        device = self._runtime.device
        self._open.callback(_watch_layers(chunks))
        if self._uses_torch:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
            # With shapes and stacks, trace viewers can attribute time to source lines.
            recorder = profile(activities=activities, record_shapes=True, with_stack=True)
            recorder.start()
            self._open.callback(self._finish_trace, recorder)
        else:
            device.start_profiler()
            self._open.callback(device.stop_profiler)
            self._open.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))  # type: ignore[no-untyped-call]

    def _end(self, last_iteration: int | None) -> None:
        self._last_iteration = last_iteration
        self._is_due = False
        # Work that is already queued belongs to the profile.
        self._runtime.device.synchronize()
        try:
            self._open.close()
        finally:
            self._first_iteration = None

    def _finish_trace(self, recorder: profile) -> None:
        recorder.stop()
        assert self._folder is not None, "checked at the start"
        iterations = f"{self._first_iteration}" + ("" if self._last_iteration is None else f"-{self._last_iteration}")
        path = Path(self._folder) / f"rank{self._runtime.state.rank}.iterations{iterations}.pt.trace.json"

        def export() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(path))

        self._write(path, export)

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:
            print_line(f"WARNING: cannot write {path}: {error}")
        else:
            print_line(f"[Rank {self._runtime.state.rank}] wrote {path}")


class _RangedTimers(Timers):
    """Timers that also open ranges in profiled iterations."""

    def __init__(self, timers: Timers, profiling: Profiling) -> None:
        super().__init__()
        self._timed = timers
        self._profiling = profiling

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        timer = self._timed(name, log_level)
        return _RangedTimer(timer) if self._profiling.is_open else timer


class _RangedTimer(Timer):
    def __init__(self, timer: Timer) -> None:
        super().__init__(timer.name, lambda: None, lambda: None, time.perf_counter)
        self._timer = timer
        self._range = ExitStack()

    def start(self, barrier: bool = False) -> None:
        self._range = _open_range(self.name)
        self._timer.start(barrier)

    def stop(self, barrier: bool = False) -> None:
        self._timer.stop(barrier)
        self._range.close()


class _ActionRanges:
    """Clock that opens a range at every odd call and closes it at the next, and returns the time."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = iter(actions)
        self._range: ExitStack | None = None

    def __call__(self) -> float:
        if self._range is None:
            action = next(self._actions)
            name = f"{action.kind.value} of micro-batch {action.microbatch}, chunk {action.chunk}"
            self._range = _open_range(name)
        else:
            self._range.close()
            self._range = None
        return time.perf_counter()


def _open_range(name: str) -> ExitStack:
    """Open a range, and return a stack that closes it."""
    stack = ExitStack()
    stack.enter_context(record_function(name))
    return stack


def _watch_layers(chunks: Sequence[Model]) -> Callable[[], None]:
    """Open a range for each layer's forward pass, and return a function that stops this."""
    handles: list[RemovableHandle] = []
    ranges: list[ExitStack] = []

    def enter(name: str) -> None:
        ranges.append(_open_range(name))

    def leave(*unused: object) -> None:
        ranges.pop().close()

    for chunk in chunks:
        for path, module in chunk.named_modules():
            if (found := _LAYER.search(path)) is not None:
                name = f"layer {found[1]}"
                handles.append(module.register_forward_pre_hook(lambda *unused, name=name: enter(name)))
                # Recomputation may stop early within a layer.
                handles.append(module.register_forward_hook(leave, always_call=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


Clock = Callable[[], float]


class ScheduleRecorder(Callback):
    """Recorder of the schedule of this job's second trained iteration, or of the first if it is the run's last.

    Skipped iterations do not count. The first iteration includes one-time work. The pipeline of the first rank is
    written, which requires synchronized clocks if it spans several nodes. On CUDA, the recorded iteration waits for the
    device at both ends of each pass.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        self._path = config.logging.record_schedule
        self._runtime = runtime
        self._last = config.train_iters
        self._begin()

    def _begin(self) -> None:
        self._num_trained = 0
        self._is_over = self._path is None
        self._actions: tuple[Action, ...] = ()
        self._times: list[float] = []

    def on_begin(self, run: TrainingRun) -> None:
        self._begin()

    def action_clock(self, inner: ActionClock) -> ActionClock:
        """Wrap a clock so that it also records its times in the iteration to record."""
        if self._is_over:
            return inner

        def begin(actions: Sequence[Action]) -> Clock | None:
            other = inner(actions)
            is_due = self._num_trained == 1 or self._runtime.flight.iteration + 1 == self._last
            if self._is_over or not is_due:
                return other
            self._actions, self._times = tuple(actions), []

            def now() -> float:
                self._runtime.device.synchronize()
                self._times.append(time.time())
                return self._times[-1] if other is None else other()

            return now

        return begin

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        self.end_iteration(report.iteration)
        return report

    def end_iteration(self, done: int) -> None:
        """Write the file if the completed iteration was recorded; every rank must call this."""
        self._num_trained += 1
        if self._path is None or not self._times:
            return
        self._is_over = True
        own = RankTimeline(self._actions, tuple(self._times[::2]), tuple(self._times[1::2]))
        timeline = gather_timeline(own, self._runtime.state.pp)
        self._actions, self._times = (), []
        if not self._runtime.is_reporter:
            return
        path = Path(self._path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_timeline(path, timeline)
        except OSError as error:
            print_line(f"WARNING: cannot write {path}: {error.strerror}")
        else:
            print_line(f"wrote {path}: the passes of iteration {done}; draw it with visualize_pipeline.py --recorded")
