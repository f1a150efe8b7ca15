"""Stragglers: which rank takes longer than its like, at what part of an iteration, and since when."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.collectives import all_gather_into
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import ParallelState
from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
from megatron.training.loggers import IntervalAverage, StepReport

PARTS = ("forward", "backward", "data", "other", "communication")
"""What the time of an iteration is divided into; all but the last is a rank's own."""
_OWN = PARTS[:-1]
_PART_OF = {"forward": "forward", "backward": "backward", "data": "data", "gradients": "other", "optimizer": "other"}
# A rank that takes this much longer than its like is called slow.
_SLOW_FACTOR = 1.1


class PartsClock:
    """Add up what a rank spends on each part of its iterations, from the phases that begin.

    On a CPU the time in communications is taken from the part that it lies in, and kept as the rank's waiting. On CUDA
    the times are the device's, and the communications of a part belong to it.
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
        """Say that a phase begins; one that is no part of an iteration is not counted."""
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
        """Return the seconds of each of `PARTS`, and begin again; on CUDA wait for the device."""
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
    """Hold the times of all ranks over some iterations, and who was slow.

    ``seconds`` has each rank's of each of `PARTS`, an iteration. ``rank`` is the slowest compared with its like, and
    ``factor`` how many times as long as its like it takes, at ``part`` above all; ``since`` is the first iteration from
    which on it was slow in every report, None where nobody is slow.
    """

    first: int
    last: int
    seconds: Sequence[Sequence[float]]
    rank: int
    factor: float
    part: str
    since: int | None

    def line(self, count: int) -> str:
        """Return the log line, with ``count`` of the slowest and of the fastest ranks."""
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
                f" rank {self.rank} takes {self.factor:.2f} times as long as its like, most at {self.part} "
                f"({1000.0 * self.seconds[self.rank][place]:.1f} ms an iteration), since iteration {self.since} |"
            )
        return f"{head} slowest: {show(order[::-1][:count])} | fastest: {show(order[:count])} |"

    def figures(self) -> dict[str, object]:
        """Return what the metrics file gets: the slow rank, and every rank's milliseconds of each part."""
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
        """Return what TensorBoard gets."""
        own = [sum(row[: len(_OWN)]) for row in self.seconds]
        return {
            "straggler-rank": -1.0 if self.since is None else float(self.rank),
            "straggler-factor": self.factor,
            "slowest-rank-time": max(own),
            "fastest-rank-time": min(own),
        }


class Stragglers(Callback):
    """Compare the ranks every so many iterations, and remember since when one is slow."""

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
        if not is_due(run.config.logging.log_interval, report.iteration):
            return report
        self._reported = self.report(report.iteration)
        return replace(report, stragglers=self._reported.figures())

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        reported = self._reported
        assert reported is not None, "an iteration with a log line has a report"
        run.log(reported.line(run.config.logging.straggler_minmax_count))
        run.log_scalars(reported.scalars(), reported.last)

    def end_iteration(self, iteration: int) -> None:
        """Take no more time until the next iteration begins; a run may go back to iterations that it has had."""
        self._clock.mark("")
        self._first = min(self._first, iteration)
        self._num_iterations += 1

    def report(self, iteration: int) -> StragglerReport:
        """Gather the times since the last report in one collective, and return what they say; equal on all ranks."""
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
    """Return the rank that takes longest of all beside its like, how many times as long, and the part that adds most.

    Its like are the ranks of its pipeline stage; where it is alone there, all ranks. Time in communications, which is
    waiting for others, does not count. The lower of two middle values is the one that is compared with.
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
