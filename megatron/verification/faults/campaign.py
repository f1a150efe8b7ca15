"""Inject faults into a run in rounds, restart it until it ends, and compare it with an uninterrupted baseline.

The result is a table or JSON.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import iteration_folder, saved_iterations
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.sharding import split_box
from megatron.verification.faults.injection import Fault, Injection
from megatron.verification.faults.launch import POLL_S, AttackedCommand, Launch, LaunchError, losses

_HEADER = (
    "round", "fault", "rank", "from", "to", "status", "as documented", "processes left", "ended after", "problem",
)  # fmt: skip


@dataclass
class Round:
    """Result of one fault: its time, and how the run ended because of it; ``status`` is None if the run continued.

    ``resumed_at`` is the iteration from which the start before the fault resumed, ``iteration`` the last completed one
    at the fault, and ``left`` the processes that still ran 10 s after their launcher's end.
    """

    number: int
    fault: str
    rank: int | None
    resumed_at: int
    iteration: int
    status: int | None = None
    documented: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    seconds: float = 0.0
    problem: str = ""

    @property
    def held(self) -> bool:
        """Return whether everything was as documented."""
        return not self.problem and not self.left and (self.status is None or self.status in self.documented)

    def cells(self) -> tuple[str, ...]:
        """Format the row of the table."""
        continued = self.status is None
        documented = "-" if continued else ("yes" if self.status in self.documented else "NO")
        left = " ".join(map(str, self.left)) or "-"
        return (
            str(self.number),
            self.fault,
            "-" if self.rank is None else str(self.rank),
            str(self.resumed_at),
            str(self.iteration),
            "continued" if continued else str(self.status),
            documented,
            left,
            f"{self.seconds:.1f} s",
            self.problem or "-",
        )


@dataclass(frozen=True)
class Check:
    """Result of a check at the end of the campaign."""

    name: str
    held: bool
    detail: str


@dataclass
class Report:
    """All rounds and the final checks."""

    command: tuple[str, ...]
    seed: int
    rounds: list[Round] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Return whether there was a fault and everything was as documented."""
        return bool(self.rounds) and all(item.held for item in self.rounds) and all(item.held for item in self.checks)

    def to_text(self) -> str:
        """Format the table, and one line per check."""
        rows = [_HEADER, *(item.cells() for item in self.rounds)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines += [f"{'ok' if check.held else 'FAILED':8}{check.name}: {check.detail}" for check in self.checks]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Convert the report to JSON-ready values."""
        rounds = [{**dataclasses.asdict(item), "held": item.held} for item in self.rounds]
        checks = [dataclasses.asdict(item) for item in self.checks]
        return {"command": self.command, "seed": self.seed, "held": self.held, "rounds": rounds, "checks": checks}


LEFT_AFTER_S = 10.0


@dataclass(frozen=True)
class Plan:
    """Number, timing and duration of the faults.

    A fault occurs when ``at_iteration`` iterations are completed since a start, or after half to one and a half times
    ``every_seconds`` since the first step. A fault that does not end the run lasts ``for_seconds``. ``patience_s`` is
    the time limit for a start's first step, and for the end of a run after a fault; a run without a fault has no limit.
    ``tolerance`` is the allowed relative difference of the final loss from the uninterrupted run; 0 requires
    bit-identical losses in every iteration.
    """

    faults: tuple[Fault, ...]
    rounds: int
    seed: int
    at_iteration: int | None
    every_seconds: float
    for_seconds: float
    patience_s: float
    tolerance: float


class Campaign:
    """Fault campaign against one command; its folder gets ``whole``, ``attacked``, ``data``, and the outputs."""

    def __init__(self, command: AttackedCommand, plan: Plan, folder: Path, log: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._log = log
        self._rng = random.Random(plan.seed)
        self._token_files: tuple[Path, ...] = ()
        self._num_starts = 0
        self._expected_damage: int | None = None
        self._whole, self._attacked = command, command
        if Fault("corrupt", "sample") in plan.faults:
            self._attacked, self._token_files = command.with_own_data(folder / "data")
        if any(fault.is_inside for fault in plan.faults):
            self._attacked = self._attacked.spoilable()
        self.report = Report(command.words, plan.seed)

    def run(self, reference: Path | None) -> Report:
        """Run all rounds, let the run finish, and check the results.

        ``reference`` is the metrics file of an uninterrupted run; without it, that run is made first.

        Raises:
            ConfigurationError: the command cannot be started, or a fault cannot be injected.
            LaunchError: the uninterrupted run fails.
            OSError: the folder cannot be written to.
        """
        if reference is None:
            self._log("an uninterrupted run")
            reference = self._folder / "whole" / "metrics.jsonl"
            self._complete(self._start(self._whole, "whole"))
        try:
            self._attack()
        except LaunchError as error:
            self.report.checks.append(Check("starts", held=False, detail=str(error)))
        self._check_losses(losses(reference))
        self._check_checkpoints()
        return self.report

    def _attack(self) -> None:
        """Run all rounds, and let the run finish."""
        while len(self.report.rounds) < self._plan.rounds and self._attack_one_start():
            continue
        if len(self.report.rounds) < self._plan.rounds:
            done = (
                f"the run ended after {len(self.report.rounds)} of {self._plan.rounds} rounds; increase its number of "
                "iterations"
            )
            self.report.checks.append(Check("faults", held=False, detail=done))
            return
        self._log("the last start, until the end")
        last = self._start(self._attacked, "attacked")
        self._complete(last)
        self._note_damage(last)

    def _start(self, command: AttackedCommand, name: str) -> Launch:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"output_{self._num_starts:03d}.txt"
        self._num_starts += 1
        return Launch(command.in_folder(folder), output, folder / "metrics.jsonl")

    def _complete(self, launch: Launch) -> None:
        try:
            launch.check(math.inf)
            left = launch.left_after(LEFT_AFTER_S)
        finally:
            launch.close()
        if left:
            raise LaunchError(
                f"processes {left} of {launch.output} were still running {LEFT_AFTER_S:g} s after its end"
            )

    def _attack_one_start(self) -> bool:
        """Start the run and inject faults until one ends it; return False if the run ends by itself."""
        launch = self._start(self._attacked, "attacked")
        try:
            if not launch.wait_until_it_trains(self._plan.patience_s):
                launch.check(self._plan.patience_s)
                return False
            self._note_damage(launch)
            while len(self.report.rounds) < self._plan.rounds:
                if not self._wait_for_the_moment(launch):
                    launch.check(self._plan.patience_s)
                    return False
                if self._do_one(launch):
                    return True
            # The last fault is over and did not end the run.
            self._complete(launch)
            return True
        finally:
            launch.close()

    def _wait_for_the_moment(self, launch: Launch) -> bool:
        """Wait until the next fault is due; return False if the run ends before."""
        plan, begin, first = self._plan, time.monotonic(), launch.resumed_at
        done = [item.iteration for item in self.report.rounds if item.status is None and item.resumed_at == first]
        wanted = max([first, *done]) + (plan.at_iteration or 0)
        delay_s = plan.every_seconds * self._rng.uniform(0.5, 1.5)
        while (time.monotonic() < begin + delay_s) if plan.at_iteration is None else launch.iteration() < wanted:
            if launch.look() is not None:
                return False
            time.sleep(POLL_S)
        return launch.look() is None

    def _do_one(self, launch: Launch) -> bool:
        """Inject a fault and observe its effect; return whether the run ended."""
        fault = self._rng.choice(self._plan.faults)
        resumed_at, iteration, begin = launch.resumed_at, launch.iteration(), time.monotonic()
        injection = Injection(fault, launch, self._folder / "attacked", self._token_files, self._rng)
        result = Round(len(self.report.rounds) + 1, str(fault), injection.rank, resumed_at, iteration)
        self.report.rounds.append(result)
        self._log(f"round {result.number}: {fault} at iteration {iteration}")
        try:
            if fault.ends_run:
                result.documented = fault.statuses(injection.has_launcher)
                result.status = launch.wait(self._plan.patience_s)
                result.left = tuple(launch.left_after(LEFT_AFTER_S))
                words = fault.last_words(injection.rank)
                if not any(line.startswith(words) for line in launch.text.splitlines()):
                    result.problem = f"no line of {launch.output} begins with {words!r}"
                self._expected_damage = injection.damaged
                if (fault.kind, fault.target, injection.damaged) == ("corrupt", "checkpoint", None):
                    result.problem = "there was no older checkpoint to fall back to; inject faults later"
            else:
                result.documented = fault.statuses(injection.has_launcher)
                result.status = self._outlast(launch)
        except LaunchError as error:
            result.problem = str(error)
        finally:
            injection.undo()
            result.seconds = time.monotonic() - begin
            if result.problem or result.left:
                launch.close()
        return launch.look() is not None

    def _outlast(self, launch: Launch) -> int | None:
        """Let a fault last while the run continues; return the exit status if the run failed because of it, or None."""
        end = time.monotonic() + self._plan.for_seconds
        while time.monotonic() < end and (status := launch.look()) is None:
            time.sleep(POLL_S)
        return status or None

    def _note_damage(self, launch: Launch) -> None:
        """Check that a damaged checkpoint was not loaded."""
        damaged, self._expected_damage = self._expected_damage, None
        if damaged is not None and launch.resumed_at >= damaged:
            self.report.rounds[-1].problem = f"the damaged checkpoint of iteration {damaged} was loaded"

    def _check_losses(self, expected: dict[int, float]) -> None:
        found = losses(self._folder / "attacked" / "metrics.jsonl")
        last = max(expected, default=0)
        if self._plan.tolerance:
            ours, theirs = found.get(last, math.nan), expected.get(last, math.nan)
            held = abs(ours - theirs) <= self._plan.tolerance * abs(theirs)
            detail = f"{ours} at iteration {last}, but {theirs} without faults"
        else:
            different = [number for number, value in expected.items() if found.get(number) != value]
            held = bool(expected) and not different
            detail = f"bitwise equal in all {len(expected)} iterations; the last loss is {expected.get(last)}"
            if not held:
                detail = f"iterations {different[:5]} differ, {len(different)} of {len(expected)}"
        self.report.checks.append(Check("losses", held=held, detail=detail))

    def _check_checkpoints(self) -> None:
        checkpoints = self._folder / "attacked" / "checkpoints"
        problems = []
        iterations = saved_iterations(checkpoints)
        for iteration in iterations:
            try:
                read_checkpoint(iteration_folder(checkpoints, iteration))
            except CheckpointError as error:
                problems.append(str(error))
        found = f"all are readable (iterations {', '.join(map(str, iterations))})" if iterations else "none was saved"
        detail = "; ".join(problems) or found
        self.report.checks.append(Check("checkpoints", held=not problems and bool(iterations), detail=detail))


def read_checkpoint(folder: Path) -> None:
    """Read a published checkpoint completely, with its checksums.

    Raises:
        CheckpointError: it is damaged.
    """
    # Imported here because the command's help must not import torch.
    from megatron.checkpoint import MAX_BOX_BYTES, open_checkpoint

    source = open_checkpoint(folder)
    try:
        for name, info in source.tensors.items():
            for box in split_box(info.whole, info.dtype.itemsize, MAX_BOX_BYTES):
                source.read(name, box)
    finally:
        source.close()


def check_folder(folder: Path) -> None:
    """Check that a folder is empty or new, because a run would resume from an earlier run's checkpoints.

    Raises:
        ConfigurationError: it is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"--folder {folder} is not empty; use a new folder")
