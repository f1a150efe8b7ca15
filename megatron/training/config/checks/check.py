"""One check of a run configuration: which fields it reads, and what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from megatron.training.config.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Check:
    """Pair a pure function that yields problems, one line each, with the fields that it reads.

    A check is left out where one of its fields has no usable value: its problem is already known.
    """

    reads: tuple[str, ...]
    find: Callable[[RunConfig], Iterable[str]]


def divisors(number: int, limit: int) -> str:
    """Return the divisors of a number up to a limit as text, for messages that say what would work."""
    return ", ".join(str(size) for size in range(1, min(abs(number), limit) + 1) if number % size == 0)
