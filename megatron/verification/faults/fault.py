"""What can be done to a run, to which of its processes, and what exit status documents say that follows."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.errors import ConfigurationError

Kind = Literal["kill", "stop", "slow", "corrupt", "fill-disk", "partition"]

ANY = "any"
EVERYBODY = ("all", "launcher")
CORRUPTIBLE = ("checkpoint", "sample", "weight", "gradient")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """Name a kind of fault and its target as on the command line; ``factor`` is how many times slower a rank gets."""

    kind: Kind
    target: str
    factor: float = 1.0

    def __str__(self) -> str:
        """Return the flag that asks for it."""
        words = self.target if self.kind != "slow" else f"{self.target}:{self.factor:g}"
        return f"--{self.kind} {words}".rstrip()

    @property
    def needs_peers(self) -> bool:
        """Return whether a rank on its own would not notice it."""
        return self.kind in ("stop", "partition")

    @property
    def is_inside(self) -> bool:
        """Return whether the process itself has to do it, when it gets a signal."""
        return self.kind == "corrupt" and self.target in ("weight", "gradient")

    @property
    def ends_run(self) -> bool:
        """Return whether the run ends by it; else it goes on while the fault lasts, and after it."""
        return self.kind not in ("slow", "fill-disk")

    def rank(self, ranks: Sequence[int], rng: random.Random) -> int | None:
        """Return the rank that it befalls, drawn where any may be; None where it is not about one.

        Raises:
            ConfigurationError: there is no such rank here, or it has no others.
        """
        if self.needs_peers and len(ranks) < 2:
            raise ConfigurationError(f"{self}: the run has one rank here, which nobody waits for; give it two or more")
        if self.target in EVERYBODY or (self.kind == "corrupt" and not self.is_inside) or self.kind == "fill-disk":
            return None
        if self.target == ANY or self.is_inside:
            return rng.choice(ranks)
        if int(self.target) not in ranks:
            here = ", ".join(map(str, ranks))
            raise ConfigurationError(f"{self}: there is no rank {self.target} here; change it to one of: {here}")
        return int(self.target)

    def statuses(self, has_launcher: bool) -> tuple[int, ...]:
        """Return the exit statuses of the command that are documented for a run that ends by it.

        torchrun's is 1 whatever its ranks' are. A run goes on while a disk is full, and fails where that is at its end.
        """
        if self.kind == "slow":
            return ()
        is_kill = self.kind == "kill" or (self.kind, self.target) == ("corrupt", "checkpoint")
        if is_kill and (self.target == "launcher" or not has_launcher):
            return _KILLED
        return (2,) if self == Fault("corrupt", "sample") and not has_launcher else (1,)

    def last_words(self, rank: int | None) -> str:
        """Return how a line begins that documents say is printed when the run ends by it; empty for none."""
        if self.kind == "stop":
            return f"HANG: rank {rank} "
        return "error: " if self.kind == "corrupt" and self.target != "checkpoint" else ""


def parse_fault(kind: Kind, text: str) -> Fault:
    """Return the fault that a flag's value names.

    Raises:
        ConfigurationError: it names none.
    """
    if kind == "corrupt":
        if text not in CORRUPTIBLE:
            raise ConfigurationError(f"--corrupt {text} is none of {', '.join(CORRUPTIBLE)}")
        return Fault(kind, text)
    target, colon, number = text.partition(":") if kind == "slow" else (text, "", "")
    others = (ANY, *(EVERYBODY if kind == "kill" else ()))
    if target not in others and not (target.isascii() and target.isdigit() and len(target) < 10):
        raise ConfigurationError(f"--{kind} {text} names no rank; give a number, or {' or '.join(others)}")
    target = target if target in others else str(int(target))
    if kind != "slow":
        return Fault(kind, target)
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not (colon and 1.0 < factor <= 1000.0):
        raise ConfigurationError(
            f"--slow {text} is not RANK:FACTOR with a factor above 1 and of at most 1000, as in 1:3"
        )
    return Fault(kind, target, factor)
