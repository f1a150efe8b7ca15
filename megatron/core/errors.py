"""The errors that users see: each says what is wrong, the values, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def choices(values: Iterable[object]) -> str:
    """Return the values that would work as text for a message, ``none`` if there are none."""
    return ", ".join(map(str, values)) or "none"


class MegatronError(Exception):
    """Base class of every error that this project raises on purpose."""


class InputError(MegatronError):
    """Report input that cannot be used; entry scripts print it without a traceback and exit with status 2."""


class ConfigurationError(InputError):
    """Report every problem of a configuration at once.

    ``problems`` holds one line each; the message is those lines joined.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(InputError):
    """Report an object store that cannot be used, or an object where a local file is needed."""


class DataError(InputError):
    """Report a data set, or an index file of one, that cannot be used."""


class TokenizerError(InputError):
    """Report a tokenizer whose files or settings cannot be used."""


class CheckpointError(InputError):
    """Report a checkpoint that is missing, damaged or of another model."""


class DamagedCheckpointError(CheckpointError):
    """Report a checkpoint whose files are missing, cut short or changed: an older one may still be whole."""


class TrainingError(MegatronError):
    """Report a run that cannot go on (a non-finite loss, a lost rank); entry scripts exit with status 1."""
