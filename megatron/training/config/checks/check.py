"""One check of a run configuration: which fields it reads, and what it finds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from megatron.core.errors import choices
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
    return choices(size for size in divisors_of(abs(number)) if size <= limit)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number above 0, the smallest first; of any other number none."""
    small = [size for size in range(1, math.isqrt(max(number, 0)) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
