"""Record which statements of the project, or which calls, each scenario executes."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.emulated_cuda.scenarios.changed_source import REPOSITORY, project_files, statements_of
from tests.emulated_cuda.scenarios.running import Result, Scenario, Servers


@dataclass(frozen=True)
class Statement:
    """A statement of a function: its file and the lines of what is executed first.

    These are the lines of a whole simple statement, and the head of one that has others inside.
    """

    path: str
    line: int
    end_line: int


def all_statements() -> list[Statement]:
    """Return the statements of all files, in the order of their probes."""
    found = []
    for path in project_files():
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        found += [Statement(path, each.lineno, _end_of_head(each)) for each in statements_of(tree)]
    return found


def _end_of_head(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        first: int = min(each.lineno for each in body)
        return max(statement.lineno, first - 1)
    assert statement.end_lineno is not None
    return statement.end_lineno


@dataclass
class Recording:
    """The results of the unchanged program in each scenario, by the scenario's name."""

    results: dict[str, Result] = field(default_factory=dict)

    def executing(self, number: int) -> list[str]:
        """Return the scenarios that execute a statement or a call, the quickest first."""
        names = [name for name, result in self.results.items() if number in result.hits]
        return sorted(names, key=lambda name: self.results[name].seconds)

    def hits(self, names: Collection[str] | None = None) -> set[int]:
        """Return what some scenario, or one of these names, executes."""
        chosen = self.results if names is None else names
        return {number for name in chosen for number in self.results[name].hits}


def record(
    servers: Servers, scenarios: Sequence[Scenario], *, may_fail: bool = False, file: Path | None = None
) -> Recording:
    """Run the unchanged program in each scenario.

    ``file`` has the results of scenarios that were run before, and receives the others. It is for source that has not
    changed since.

    Raises:
        AssertionError: a scenario fails that may not.
    """
    recording = Recording(read_recorded(file))
    for number, scenario in enumerate(scenarios, 1):
        if scenario.name in recording.results:
            continue
        result = servers.of(scenario).run(scenario)
        if result.fault and not may_fail:
            raise AssertionError(f"scenario {scenario.name!r} fails without a change: {result.fault}")
        print(f"recorded {number}/{len(scenarios)}: {scenario.name} ({result.seconds} s)", file=sys.stderr, flush=True)
        recording.results[scenario.name] = result
        if file is not None:
            with file.open("a") as lines:
                values = {**dataclasses.asdict(result), "hits": sorted(result.hits)}
                lines.write(json.dumps([scenario.name, values]) + "\n")
    return recording


def read_recorded(file: Path | None) -> dict[str, Result]:
    """Return the results that a file has, by the names of the scenarios."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        name: Result(
            values["fault"],
            tuple(values["metrics"]),
            values["seconds"],
            frozenset(values["hits"]),
            tuple(values["host_waits"]),
            tuple(tuple(devices) for devices in values["devices"]),
        )
        for name, values in rows
    }
