"""Straggler detection: which rank is slower than its peers, in which part of an iteration, and since when."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.collectives import all_gather_into
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import ParallelState
from megatron.training.callbacks.callback import Callback, TrainingRun
from megatron.training.loggers import IntervalAverage, StepReport

PARTS = ("forward", "backward", "data", "other", "communication")
"""Parts of an iteration's time; all except communication are the rank's own work."""
_OWN = PARTS[:-1]
_PART_OF = {"forward": "forward", "backward": "backward", "data": "data", "gradients": "other", "optimizer": "other"}
# Factor over its peers above which a rank is reported as slow.
_SLOW_FACTOR = 1.1


class PartsClock:
    """Clock of the time that a rank spends in each part of its iterations, from the starts of phases.

    On a CPU, the time in collectives is subtracted from the enclosing part and counted as waiting. On CUDA, the times
    are device times, and a part includes its collectives.
    """

    def __init__(self, recorder: FlightRecorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0
        self._waited_s = 0.0
        self._moments: list[tuple[str | None, torch.Event]] = []

    def mark(self, phase: str) -> None:
        """Record the start of a phase; a phase that is no part of an iteration is not counted."""
        now, waited_s = time.perf_counter(), self._recorder.waited_s
        if self._part is not None:
            waiting = waited_s - self._waited_s
            self._seconds["communication"] += waiting
            if self._device.type != "cuda":
                self._seconds[self._part] += now - self._since - waiting
        self._part, self._since, self._waited_s = _PART_OF.get(phase), now, waited_s
        if self._device.type == "cuda":
            moment = torch.Event(self._device, enable_timing=True)
            moment.record()
            self._moments.append((self._part, moment))

    def take(self) -> list[float]:
        """Return and reset the seconds of each of `PARTS`; on CUDA wait for the device."""
        for (part, begin), (_, end) in zip(self._moments, self._moments[1:]):
            if part is not None:
                end.synchronize()
                self._seconds[part] += begin.elapsed_time(end) / 1000.0
        self._moments = self._moments[-1:]
        taken = [self._seconds[part] for part in PARTS]
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return taken


@dataclass(frozen=True)
class StragglerReport:
    """Times of all ranks over some iterations, and the slow rank.

    ``seconds`` has one row per rank, with the time per iteration of each of `PARTS`. ``rank`` is the slowest rank
    relative to its peers, ``factor`` its time relative to theirs, and ``part`` the part with the largest excess.
    ``since`` is the first iteration since which every report found it slow, or None if no rank is slow.
    """

    first: int
    last: int
    seconds: Sequence[Sequence[float]]
    rank: int
    factor: float
    part: str
    since: int | None

    def line(self, count: int) -> str:
        """Format the log line, with the ``count`` slowest and fastest ranks."""
        own = [sum(row[: len(_OWN)]) for row in self.seconds]
        order = sorted(range(len(own)), key=lambda rank: own[rank])

        def show(ranks: Sequence[int]) -> str:
            return ", ".join(f"{rank} ({1000.0 * own[rank]:.1f} ms)" for rank in ranks)

        place = PARTS.index(self.part)
        head = f" stragglers | iterations {self.first} to {self.last} |"
        if self.since is None:
            head += " none |"
        else:
            head += (
                f" rank {self.rank} takes {self.factor:.2f} times as long as its peers, most at {self.part} "
                f"({1000.0 * self.seconds[self.rank][place]:.1f} ms per iteration), since iteration {self.since} |"
            )
        return f"{head} slowest: {show(order[::-1][:count])} | fastest: {show(order[:count])} |"

    def figures(self) -> dict[str, object]:
        """Return the entry of the metrics file: the slow rank, and every rank's milliseconds of each part."""
        return {
            "slow_rank": None if self.since is None else self.rank,
            "factor": self.factor,
            "part": self.part,
            "since_iteration": self.since,
            "milliseconds": {
                part: [round(1000.0 * row[place], 3) for row in self.seconds] for place, part in enumerate(PARTS)
            },
        }

    def scalars(self) -> dict[str, float]:
        """Return the scalars for TensorBoard."""
        own = [sum(row[: len(_OWN)]) for row in self.seconds]
        return {
            "straggler-rank": -1.0 if self.since is None else float(self.rank),
            "straggler-factor": self.factor,
            "slowest-rank-time": max(own),
            "fastest-rank-time": min(own),
        }


class Stragglers(Callback):
    """Comparison of the ranks at each log interval, with the iteration since which a rank is slow."""

    def __init__(self, clock: PartsClock, state: ParallelState, device: torch.device, iteration: int) -> None:
        self._clock = clock
        self._state = state
        self._device = device
        self._first = iteration + 1
        self._num_iterations = 0
        self._since: dict[int, int] = {}
        self._reported: StragglerReport | None = None
        clock.take()

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        self.end_iteration(report.iteration)
        if not run.log_interval.is_due(report.iteration):
            return report
        self._reported = self.report(report.iteration)
        return replace(report, stragglers=self._reported.figures())

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        reported = self._reported
        assert reported is not None, "an iteration with a log line has a report"
        run.log(reported.line(run.config.logging.straggler_minmax_count))
        run.log_scalars(reported.scalars(), reported.last)

    def end_iteration(self, iteration: int) -> None:
        """Stop counting until the next iteration starts; after a rollback, iterations may repeat."""
        self._clock.mark("")
        self._first = min(self._first, iteration)
        self._num_iterations += 1

    def report(self, iteration: int) -> StragglerReport:
        """Gather the times since the last report in one collective and evaluate them; equal on all ranks."""
        first, self._first = self._first, iteration + 1
        count, self._num_iterations = self._num_iterations, 0
        own = torch.tensor([self._clock.take()], dtype=torch.float64, device=self._device)
        gathered = own.new_empty((self._state.world_size, len(PARTS)))
        all_gather_into(gathered, own, self._state.world)
        seconds = (gathered / count).tolist()
        stages = [self._state.sizes.place(rank)["pp"] for rank in range(self._state.world_size)]
        rank, factor, part = slowest(seconds, stages)
        self._since = {rank: min(self._since.get(rank, first), first)} if factor > _SLOW_FACTOR else {}
        return StragglerReport(first, iteration, seconds, rank, factor, part, self._since.get(rank))


def slowest(seconds: Sequence[Sequence[float]], stages: Sequence[int]) -> tuple[int, float, str]:
    """Return the rank that is slowest relative to its peers, by what factor, and the part with the most excess.

    The peers are the ranks of the same pipeline stage, or all ranks if it is alone in its stage. Time in collectives
    does not count, because it is spent waiting for other ranks. The reference is the median of the peers, the lower one
    of two middle values.
    """
    own = [sum(row[: len(_OWN)]) for row in seconds]
    best = (0, 0.0, PARTS[0])
    for rank, mine in enumerate(own):
        like = [other for other, stage in enumerate(stages) if stage == stages[rank]]
        like = like if len(like) > 1 else list(range(len(own)))
        usual = statistics.median_low(own[other] for other in like)
        factor = mine / usual if usual > 0 else 1.0
        if factor > best[1]:
            excess = {
                part: seconds[rank][place] - statistics.median_low(seconds[other][place] for other in like)
                for place, part in enumerate(_OWN)
            }
            best = (rank, factor, max(excess, key=lambda part: excess[part]))
    return best
