"""Read a run's metrics file into series of values by iteration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from megatron.core.errors import DataError

METRICS_FILE = "metrics.jsonl"
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class MetricsRecord:
    """Metrics of one run: ``figures`` are points (iteration, value) by metric, ``samples`` texts by iteration.

    ``evaluations`` are losses by validation set. ``data_sets`` are training losses by data set, as (iteration, loss,
    tokens), if several are blended. ``stragglers`` are straggler reports by iteration, and ``skipped`` lists the
    iterations whose update was skipped. ``color`` is the index of the run's color.
    """

    name: str
    path: Path
    figures: dict[str, Points] = field(default_factory=dict)
    evaluations: dict[str, Points] = field(default_factory=dict)
    data_sets: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    stragglers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    color: int = 0

    @property
    def last_iteration(self) -> int:
        """Return the last training iteration in the file, or 0 if there is none."""
        return int(max((points[-1][0] for points in self.figures.values() if points), default=0))


def metrics_file(given: Path) -> Path:
    """Return the metrics file of a ``--save`` folder, or the given file itself.

    Raises:
        DataError: the metrics file does not exist.
    """
    path = given / METRICS_FILE if given.is_dir() else given
    if not path.is_file():
        raise DataError(f"{given} contains no {METRICS_FILE}; pass a run's --save folder or its metrics file")
    return path


def read_metrics(given: Path, name: str | None = None) -> MetricsRecord:
    """Read a run's metrics, and skip invalid lines, such as the partial last line of a running run.

    Raises:
        DataError: there is no such file, or it contains no iteration of a run.
    """
    path = metrics_file(given)
    record = MetricsRecord(name or _name_of(path), path)
    found = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                values = _parsed(line)
                if values is not None:
                    _take(record, values)
                    found = True
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise DataError(f"{path} contains no iteration yet; pass the metrics.jsonl of a run that has trained")
    return record


def read_several(given: list[Path]) -> list[MetricsRecord]:
    """Read several runs and give each a color and a unique name: the shortest unique suffix of its path.

    Raises:
        DataError: a run cannot be read.
    """
    records = [read_metrics(path) for path in dict.fromkeys(given)]
    parts = [record.path.resolve().parent.parts for record in records]
    for depth in range(1, 8):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            break
    if len(set(names)) < len(names):
        names = [str(record.path) for record in records]
    if len(records) > 1:
        both = zip(names, records, strict=True)
        records = [replace(record, name=name, color=number) for number, (name, record) in enumerate(both)]
    return records


def _name_of(path: Path) -> str:
    folder = path.resolve().parent
    # A folder with a name such as "checkpoints" does not identify the run.
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("checkpoint") else folder.name or path.stem


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("iteration")) is not int:
        return None
    return values


def _take(record: MetricsRecord, values: Mapping[str, Any]) -> None:
    iteration: int = values["iteration"]
    if isinstance(values.get("samples"), list):
        record.samples[iteration] = [
            {name: str(text) for name, text in sample.items()}
            for sample in values["samples"]
            if isinstance(sample, dict)
        ]
    elif isinstance(values.get("split"), str):
        _add(record.evaluations.setdefault(values["split"], []), iteration, values.get("lm_loss"))
    else:
        if values.get("skipped") is True:
            record.skipped.append(iteration)
        if isinstance(values.get("stragglers"), dict):
            record.stragglers[iteration] = values["stragglers"]
        if isinstance(values.get("data_sets"), dict):
            _take_data_sets(record, iteration, values["data_sets"])
        for name, value in _flat(values):
            _add(record.figures.setdefault(name, []), iteration, value)


def _take_data_sets(record: MetricsRecord, iteration: int, losses: Mapping[str, Any]) -> None:
    for name, each in losses.items():
        if isinstance(each, dict) and _is_figure(each.get("lm_loss")) and _is_figure(each.get("num_tokens")):
            record.data_sets.setdefault(name, []).append((iteration, each["lm_loss"], each["num_tokens"]))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name == "memory_mib" and isinstance(value, dict):
            yield from ((f"memory_mib.{part}", each) for part, each in value.items())
        elif name not in ("iteration", "skipped"):
            yield name, value


def _add(points: Points, iteration: int, value: object) -> None:
    if _is_figure(value):
        points.append((iteration, float(value)))


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
