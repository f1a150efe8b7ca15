"""Files of measured runs: one record a run, with the model's shape, the layout, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.errors import DataError

_MOST = 10**12
"""No number of a record is larger."""


class Fields:
    """Read the fields of one JSON object, and name it in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def part(self, name: str) -> Fields:
        """Return an object that is a field; an empty one where it is missing or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value or {}, f"{self.where}: {name}")

    def integer(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """Return a whole number from 1 to ``most``; a missing one or null is the default, where there is one."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a whole number of 1 or more")
        if value > most:
            raise self.error(name, f"a whole number of at most {most}")
        return value

    def optional(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None for null or nothing."""
        return None if self.values.get(name) is None else self.integer(name)

    def switch(self, name: str, default: bool) -> bool:
        """Return true or false; null or nothing is the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return text; null or nothing is the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "text")
        return value

    def number(self, name: str) -> float | None:
        """Return a number above 0, or None for null or nothing."""
        value = self.values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.error(name, "a number above 0")
        return float(value)

    def error(self, name: str, wanted: str) -> DataError:
        """Return the error of a field that is missing or of another kind."""
        if name not in self.values:
            return DataError(f"{self.where}: {name} is missing; give {wanted}")
        found = json.dumps(self.values[name])
        shown = found if len(found) <= 60 else found[:57] + "..."
        return DataError(f"{self.where}: {name} is {shown}; give {wanted}")


@dataclass(frozen=True)
class Measured:
    """Hold what a run came to, and which of it a prediction is judged on; None is not known."""

    outcome: str
    memory_mib: float | None
    ms_per_iter: float | None
    scores_memory: bool
    scores_time: bool
    scores_outcome: bool


@dataclass(frozen=True)
class MeasuredRun:
    """Hold one record; ``shows_allocator`` says that memory is the allocator's and not what a GPU shows as used."""

    id: str
    model_name: str
    fields: Fields
    measured: Measured
    shows_allocator: bool


def read_runs(path: Path, left_out: list[DataError] | None = None) -> Sequence[MeasuredRun]:
    """Read a file of measured runs. With a list ``left_out`` unusable records are left out, and their errors added.

    Raises:
        DataError: it cannot be read, or is not of this form; without ``left_out`` also: a record is unusable.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a file of measured runs") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({str(error)[:100]}); give a file of measured runs") from error
    records = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f'{path} has no list of records; it should be {{"runs": [{{...}}, ...]}}')
    runs: dict[str, MeasuredRun] = {}
    for number, record in enumerate(records):
        with leaving_out(left_out):
            run = _read_run(Fields(record, f"{path}: record {number}"))
            if run.id in runs:
                raise DataError(f"{path}: two records have the id {run.id}; rename one")
            runs[run.id] = run
    return list(runs.values())


@contextmanager
def leaving_out(left_out: list[DataError] | None) -> Iterator[None]:
    """Add the error of one record to a list, if there is a list."""
    try:
        yield
    except DataError as error:
        if left_out is None:
            raise
        left_out.append(error)


def _read_run(fields: Fields) -> MeasuredRun:
    name = fields.text("id")
    if not name:
        raise fields.error("id", "text that names the record")
    fields.where = f"{fields.where.rpartition(': ')[0]}: run {name}"
    scored, memory = fields.part("scored"), fields.part("memory")
    per_rank = memory.part("per_rank")
    peaks = [Fields(rank, f"{per_rank.where}") for rank in per_rank.values.values() if isinstance(rank, dict)]
    allocated = [peak.number("max_allocated") for peak in peaks]
    used = memory.number("value_mib")
    measured = Measured(
        outcome=fields.text("outcome"),
        memory_mib=max((peak for peak in allocated if peak is not None), default=used),
        ms_per_iter=fields.number("ms_per_iter"),
        scores_memory=scored.switch("memory", True),
        scores_time=scored.switch("time", True),
        scores_outcome=scored.switch("outcome", True),
    )
    shows_allocator = bool(per_rank.values) or "allocated" in memory.text("kind")
    return MeasuredRun(name, fields.part("model").text("name", "unnamed"), fields, measured, shows_allocator)
