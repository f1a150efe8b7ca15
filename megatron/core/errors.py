"""User-facing errors: each message states what is wrong, the value and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def choices(values: Iterable[object]) -> str:
    """Format the accepted values for a message; return ``none`` if there are none."""
    return ", ".join(map(str, values)) or "none"


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
