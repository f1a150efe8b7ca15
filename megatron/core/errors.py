"""User-facing errors: each message states what is wrong, the value and how to fix it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def choices(values: Iterable[object]) -> str:
    """Format the accepted values for a message; return ``none`` if there are none."""
    return ", ".join(map(str, values)) or "none"


def divisors(number: int, limit: int) -> str:
    """Format the divisors of a number up to a limit, for messages."""
    return choices(size for size in divisors_of(abs(number)) if size <= limit)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order; empty for other numbers."""
    small = [size for size in range(1, math.isqrt(max(number, 0)) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


class MegatronError(Exception):
    """Base class of every error that this project raises deliberately."""


class InputError(MegatronError):
    """Unusable input; entry scripts print it without a traceback and exit with status 2."""


class ConfigurationError(InputError):
    """All problems of a configuration in one error.

    ``problems`` has one line per problem; the message joins these lines.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(InputError):
    """Unusable object store, or an object where a local file is required."""


class DataError(InputError):
    """Unusable dataset, or unusable index file of a dataset."""


class TokenizerError(InputError):
    """Tokenizer with unusable files or settings."""


class CheckpointError(InputError):
    """Checkpoint that is missing, damaged or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """Checkpoint whose files are missing, truncated or modified; an older checkpoint may still be intact."""


class TrainingError(MegatronError):
    """Run that cannot continue (a non-finite loss, a lost rank); entry scripts exit with status 1."""
