"""What rounds of faults came to: a table, and the same as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

_HEADER = ("round", "fault", "rank", "from", "to", "status", "as documented", "left", "ended after", "problem")


@dataclass
class Round:
    """Hold one fault: when it came, and how the run ended by it; ``status`` is None where it went on.

    ``resumed_at`` is the iteration that the start before it began with, ``iteration`` how far that had come,
    ``left`` the processes that still ran 10 s after their launcher's end.
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
        """Return whether all was as documented."""
        return not self.problem and not self.left and (self.status is None or self.status in self.documented)

    def cells(self) -> tuple[str, ...]:
        """Return its row of the table."""
        went_on = self.status is None
        documented = "-" if went_on else ("yes" if self.status in self.documented else "NO")
        left = " ".join(map(str, self.left)) or "-"
        return (
            str(self.number),
            self.fault,
            "-" if self.rank is None else str(self.rank),
            str(self.resumed_at),
            str(self.iteration),
            "went on" if went_on else str(self.status),
            documented,
            left,
            f"{self.seconds:.1f} s",
            self.problem or "-",
        )


@dataclass(frozen=True)
class Check:
    """Hold what was looked at when all was over."""

    name: str
    held: bool
    detail: str


@dataclass
class Report:
    """Hold all rounds and the checks at the end."""

    command: tuple[str, ...]
    seed: int
    rounds: list[Round] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Return whether there was a fault and all was as documented."""
        return bool(self.rounds) and all(item.held for item in self.rounds) and all(item.held for item in self.checks)

    def to_text(self) -> str:
        """Return the table, and a line for each check."""
        rows = [_HEADER, *(item.cells() for item in self.rounds)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines += [f"{'held' if check.held else 'BROKEN':8}{check.name}: {check.detail}" for check in self.checks]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        rounds = [{**dataclasses.asdict(item), "held": item.held} for item in self.rounds]
        checks = [dataclasses.asdict(item) for item in self.checks]
        return {"command": self.command, "seed": self.seed, "held": self.held, "rounds": rounds, "checks": checks}
