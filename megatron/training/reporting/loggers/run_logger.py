"""What every logger of a run can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from megatron.training.config.run_config import RunConfig

OF_DATA_SET: Final = "lm loss of data set"
"""What the name of a data set stands behind, and a stroke, where its training loss is a figure."""


class RunLogger(Protocol):
    """Take the figures and the texts of one run.

    Every method but ``close`` may raise an OSError: what it was given is lost, and the logger is of no more use.
    """

    name: str
    """What the logger is called in messages."""

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Take figures of an iteration; ``samples`` are those consumed, where figures are kept over them too."""

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Take a text in Markdown."""

    def close(self) -> None:
        """Write what is left and end."""


def hyperparameters(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return every flag of a run by the name of its field, as plain values; lists are words, None is ``none``."""
    values: dict[str, bool | int | float | str] = {}
    for spec, value in config.flags():
        plain = " ".join(map(str, value)) if isinstance(value, tuple) else value
        values[spec.name] = "none" if plain is None else plain
    return values
