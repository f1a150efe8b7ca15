"""Named timers and their report over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.core.errors import MegatronError
from megatron.core.parallel_state import ParallelState, gather_from_world

_NAME_WIDTH = 48


class Timer:
    """Add up the time between ``start`` and ``stop``; one whose level is not logged does nothing.

    The device is waited for at both ends, so that the time is that of the work and not of queueing it. ``barrier``
    waits for the other ranks first: ask for it only where a slow peer's time must not count as this rank's.
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
        """Begin a stretch of time."""
        if not self.is_active:
            return
        if self._start_time is not None:
            raise MegatronError(f"timer {self.name} was started twice")
        self._wait(barrier)
        self._start_time = self._clock()

    def stop(self, barrier: bool = False) -> None:
        """End the stretch and add it."""
        if not self.is_active:
            return
        if self._start_time is None:
            raise MegatronError(f"timer {self.name} was stopped without having been started")
        self._wait(barrier)
        self._elapsed_s += self._clock() - self._start_time
        self._start_time = None
        self.has_run = True

    def elapsed_s(self, reset: bool = True) -> float:
        """Return the seconds so far, a running stretch included; ``reset`` begins again from zero."""
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
        """Start."""
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Stop."""
        self.stop()


class Timers:
    """Hold a run's timers: ``with timers("forward-backward", log_level=1): ...``.

    ``log_level`` is how much the run times (``--timing-log-level``): timers of a higher level do nothing.
    ``log_option`` (``--timing-log-option``) is what a report shows of the ranks: max, minmax or all. ``note`` is told
    the name of every timer that is asked for, whatever its level.
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
        """Return the timer of this name, made at the first call with its level."""
        self._note(name)
        timer = self._timers.get(name)
        if timer is None:
            is_active = log_level <= self.log_level
            timer = Timer(name, self._synchronize, self._barrier, self._clock, is_active)
            self._timers[name] = timer
        return timer

    def elapsed_s(self, names: Sequence[str] | None = None, reset: bool = True) -> dict[str, float]:
        """Return this rank's seconds of the timers that have run (all of them, or the named ones)."""
        chosen = list(self._timers) if names is None else [name for name in names if name in self._timers]
        return {name: self._timers[name].elapsed_s(reset) for name in chosen if self._timers[name].is_reported}

    def report(
        self,
        state: ParallelState,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
    ) -> str:
        """Return Megatron's lines on the times over all ranks, in milliseconds, on the first rank; all ranks must call.

        ``normalizer`` divides the times: the number of iterations since the last report. Empty if nothing has run, and
        on other ranks.
        """
        return format_report(self.gather(state, names, normalizer, reset), self.log_option)

    def gather(
        self, state: ParallelState, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True
    ) -> list[dict[str, float]]:
        """Return what `format_report` is given: each rank's times by name in milliseconds, on the first rank.

        All ranks must call; the others receive nothing.
        """
        local = {name: s * 1000.0 / normalizer for name, s in self.elapsed_s(names, reset).items()}
        return gather_from_world(local, state)


def format_report(times_ms: Sequence[dict[str, float]], log_option: str = "minmax") -> str:
    """Return the report of each rank's times by name; a rank on which a timer did not run counts for nothing."""
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
