"""Named timers, and their report over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.core.errors import MegatronError
from megatron.core.parallel_state import ParallelState, gather_from_world

_NAME_WIDTH = 48


class Timer:
    """Accumulator of the time between ``start`` and ``stop``; no-op if its level is not logged.

    It synchronizes the device at both ends, so that it measures execution and not launch time. ``barrier`` first waits
    for the other ranks: use it only if the waiting time for a slower rank must not count for this rank.
    """

    def __init__(
        self,
        name: str,
        synchronize: Callable[[], None],
        barrier: Callable[[], None],
        clock: Callable[[], float],
        is_active: bool = True,
    ) -> None:
        self.name = name
        self.is_active = is_active
        self.has_run = False
        self._synchronize = synchronize
        self._barrier = barrier
        self._clock = clock
        self._elapsed_s = 0.0
        self._start_time: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start an interval."""
        if not self.is_active:
            return
        if self._start_time is not None:
            raise MegatronError(f"timer {self.name} was started twice")
        self._wait(barrier)
        self._start_time = self._clock()

    def stop(self, barrier: bool = False) -> None:
        """End the interval and add it."""
        if not self.is_active:
            return
        if self._start_time is None:
            raise MegatronError(f"timer {self.name} was stopped without having been started")
        self._wait(barrier)
        self._elapsed_s += self._clock() - self._start_time
        self._start_time = None
        self.has_run = True

    def elapsed_s(self, reset: bool = True) -> float:
        """Return the accumulated seconds, including a running interval; ``reset`` restarts from zero."""
        elapsed = self._elapsed_s
        if self._start_time is not None:
            self._wait(barrier=False)
            now = self._clock()
            elapsed += now - self._start_time
            if reset:
                self._start_time = now
        if reset:
            self._elapsed_s = 0.0
            self.has_run = False
        return elapsed

    @property
    def is_reported(self) -> bool:
        return self.has_run or self._start_time is not None

    def _wait(self, barrier: bool) -> None:
        if barrier:
            self._barrier()
        self._synchronize()

    def __enter__(self) -> Timer:
        """Start the timer."""
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Stop the timer."""
        self.stop()


class Timers:
    """The timers of a run: ``with timers("forward-backward", log_level=1): ...``.

    ``log_level`` is the run's ``--timing-log-level``: timers of a higher level are no-ops. ``log_option``
    (``--timing-log-option``) selects the reported statistic over ranks: max, minmax or all. ``note`` is called with the
    name of every requested timer, whatever its level.
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: str = "minmax",
        *,
        synchronize: Callable[[], None] = lambda: None,
        barrier: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        note: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.log_level = log_level
        self.log_option = log_option
        self._synchronize = synchronize
        self._barrier = barrier
        self._clock = clock
        self._note = note
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """Return the timer of this name, creating it with this level on the first call."""
        self._note(name)
        timer = self._timers.get(name)
        if timer is None:
            is_active = log_level <= self.log_level
            timer = Timer(name, self._synchronize, self._barrier, self._clock, is_active)
            self._timers[name] = timer
        return timer

    def elapsed_s(self, names: Sequence[str] | None = None, reset: bool = True) -> dict[str, float]:
        """Return this rank's seconds per timer that has run (all timers, or the named ones)."""
        chosen = list(self._timers) if names is None else [name for name in names if name in self._timers]
        return {name: self._timers[name].elapsed_s(reset) for name in chosen if self._timers[name].is_reported}

    def report(
        self,
        state: ParallelState,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
    ) -> str:
        """Return the report of the times over all ranks, in milliseconds, in Megatron-LM's format; collective.

        ``normalizer`` divides the times: the number of iterations since the last report. The report is empty if no
        timer has run, and on all ranks but the first.
        """
        return format_report(self.gather(state, names, normalizer, reset), self.log_option)

    def gather(
        self, state: ParallelState, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True
    ) -> list[dict[str, float]]:
        """Gather each rank's times by name in milliseconds on the first rank, for `format_report`; collective.

        The other ranks receive an empty list.
        """
        local = {name: s * 1000.0 / normalizer for name, s in self.elapsed_s(names, reset).items()}
        return gather_from_world(local, state)


def format_report(times_ms: Sequence[dict[str, float]], log_option: str = "minmax") -> str:
    """Format the report of each rank's times by name; ranks on which a timer did not run are left out of its line."""
    names = list(dict.fromkeys(name for times in times_ms for name in times))
    if not names:
        return ""
    lines = [
        {
            "max": "max time across ranks (ms):",
            "minmax": "(min, max) time across ranks (ms):",
            "all": "times across ranks (ms):",
        }[log_option]
    ]
    for name in names:
        values = [times[name] for times in times_ms if name in times]
        label = f"{name} ".ljust(_NAME_WIDTH, ".")
        if log_option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {times[name]:.2f}" for rank, times in enumerate(times_ms) if name in times]
        elif log_option == "max":
            lines.append(f"    {label}: {max(values):.2f}")
        else:
            lines.append(f"    {label}: ({min(values):.2f}, {max(values):.2f})")
    return "\n".join(lines)
