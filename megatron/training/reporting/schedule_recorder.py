"""When each pass of one iteration ran on the ranks of a pipeline, written as a timeline that can be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.executor import gather_timeline
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.pipeline_parallel.timeline import RankTimeline, write_timeline
from megatron.training.config.run_config import RunConfig
from megatron.training.process.console import print_line
from megatron.training.process.initialize import Runtime

Clock = Callable[[], float]
ActionClock = Callable[[Sequence[Action]], Clock | None]


class ScheduleRecorder:
    """Record the second iteration that this job trains, or the first where it is the run's last.

    Iterations that are passed over do not count. The first one has work that others do not have. The pipeline of the
    first rank is written; clocks of several machines must agree. On CUDA the recorded iteration waits for the device at
    both ends of each pass.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        self._path = config.logging.record_schedule
        self._runtime = runtime
        self._last = config.train_iters
        self._num_trained = 0
        self._is_over = self._path is None
        self._actions: tuple[Action, ...] = ()
        self._times: list[float] = []

    def action_clock(self, inner: ActionClock) -> ActionClock:
        """Return what also keeps the times that the executor asks for, where the iteration is the one to record."""
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

    def end_iteration(self, done: int) -> None:
        """Write the file where the iteration that ends was recorded; every rank must call."""
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
