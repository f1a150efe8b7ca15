"""Run scenarios by a server of ranks, and compare their results with those of the unchanged program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.emulated_cuda.environment import REPOSITORY, emulated_environment

NUM_DEVICES = 4
NOTHING, STATEMENTS, CALLS = "nothing", "statements", "calls"
"""What a server observes."""
MODULES_FILE = "imported-modules"
"""The file in the folder of a run with the names of the modules of the project that were imported."""
DEVICES_FILE = "devices-of-rank-"
"""The beginning of the name of a rank's file with its use of devices in each launch."""
_VARYING = ("second", "time", "tflops", "mfu", "stragglers", "started", "commit", "throughput")
"""Parts of the names of metrics that no two runs of a program have alike."""
_ERROR_CHARACTERS = 400
TIMED_OUT = "the run did not end"
MEMORY = "memory_mib"
"""The metric of memory."""


@dataclass(frozen=True)
class Launch:
    """One start of a program on some ranks. ``{folder}`` in an argument is the folder of the run.

    A program is a path relative to the repository. ``statuses`` are the exit statuses of its ranks. ``memory`` has the
    bytes of each rank's device, where they are not those of the GPU type. ``local_ranks`` are those of the ranks, where
    they are not the ranks.
    """

    arguments: tuple[str, ...]
    ranks: int = 1
    program: str = "pretrain_gpt.py"
    statuses: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()

    @property
    def expected(self) -> list[int]:
        """Return the exit statuses of the unchanged program."""
        return list(self.statuses or (0,) * self.ranks)


@dataclass(frozen=True)
class Scenario:
    """Launches one after the other in one folder; ``triton`` says whether Triton programs are interpreted."""

    name: str
    launches: tuple[Launch, ...]
    triton: bool = False
    gpu: str = "h100"
    limit_s: float = 180.0


@dataclass(frozen=True)
class Result:
    """What a run of a scenario left: ``fault`` is empty, or what went wrong in one line.

    ``metrics`` are the lines of its metrics files, ``hits`` the numbers of what it executed, as the server observes it.
    ``host_waits`` counts how often the host has waited for a device: of each rank and launch. ``devices`` are those on
    which it has had memory.
    """

    fault: str
    metrics: tuple[Mapping[str, Any], ...]
    seconds: float
    hits: frozenset[int] = frozenset()
    host_waits: tuple[int, ...] = ()
    devices: tuple[tuple[int, ...], ...] = ()


class RankServer:
    """A process that forks the ranks of runs, on emulated devices or on the CPU."""

    def __init__(
        self, *, emulated: bool = True, triton: bool = False, gpu: str = "h100", observes: str = NOTHING
    ) -> None:
        if emulated:
            variables = emulated_environment(NUM_DEVICES, gpu, triton=triton)
        else:
            variables = {**os.environ, "MEGATRON_DEVICE": "cpu"}
            variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), variables.get("PYTHONPATH", "")])
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.emulated_cuda.scenarios.rank_server", observes],
            cwd=REPOSITORY,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of one request.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of ranks ended with status {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def run(self, scenario: Scenario, *, removed: int = -1, keep: bool = False) -> Result:
        """Run a scenario; a server that observes calls may leave one out, by its number.

        With ``keep`` the folder stays, and its name is printed.
        """
        folder = Path(tempfile.mkdtemp(prefix="scenario-"))
        seconds, hits, fault = 0.0, set[int](), ""
        try:
            for launch in scenario.launches:
                for log in folder.glob("rank_*.log"):
                    log.unlink()
                request = {
                    "program": str(REPOSITORY / launch.program),
                    "arguments": [word.format(folder=folder) for word in launch.arguments],
                    "ranks": launch.ranks,
                    "folder": str(folder),
                    "removed": removed,
                    "limit_s": scenario.limit_s,
                    "may_fail": any(launch.expected),
                    "variables": dict(launch.variables),
                    "memory": list(launch.memory),
                    "local_ranks": list(launch.local_ranks or range(launch.ranks)),
                }
                found = self.ask(request)
                seconds += found["seconds"]
                hits |= set(found["hits"])
                fault = _fault(folder, found, launch)
                if fault:
                    break
            may_fail = any(any(launch.expected) for launch in scenario.launches)
            uses = [] if may_fail else _uses_of_devices(folder)
            waits, devices = tuple(use[0] for use in uses), tuple(tuple(use[1]) for use in uses)
            return Result(fault, tuple(_metrics(folder)), round(seconds, 2), frozenset(hits), waits, devices)
        finally:
            if keep:
                print(f"{scenario.name}: {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)


class Servers:
    """Servers of ranks for each GPU type, with and without Triton, which are started when they are needed."""

    def __init__(self, *, emulated: bool = True, observes: str = NOTHING) -> None:
        self._emulated = emulated
        self._observes = observes
        self._started: dict[tuple[bool, str], RankServer] = {}

    def of(self, scenario: Scenario) -> RankServer:
        """Return the server that runs a scenario."""
        key = (scenario.triton, scenario.gpu)
        if key not in self._started:
            self._started[key] = RankServer(
                emulated=self._emulated, triton=scenario.triton, gpu=scenario.gpu, observes=self._observes
            )
        return self._started[key]

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._started.values():
            server.__exit__(kind, error, trace)


def _fault(folder: Path, found: Mapping[str, Any], launch: Launch) -> str:
    """Return in one line what went wrong: the first report, the first exception, or a rank that does not end."""
    reports = folder / "reports"
    if reports.exists():
        return " ".join(reports.read_text().splitlines()[0].partition(": ")[2].split())
    if found["timed_out"]:
        return TIMED_OUT
    if found["statuses"] != launch.expected:
        return f"exit statuses {found['statuses']}: {_last_error(folder)}"
    return ""


def _last_error(folder: Path) -> str:
    """Return the last line of a log that names an error, or the last line of all."""
    lines = [
        line.strip()
        for log in sorted(folder.glob("rank_*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines or ["no message"])[-1][:_ERROR_CHARACTERS]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Return what is the same in each run of the metrics files, in the order of their names."""
    rows = (json.loads(line) for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines())
    return [{key: row[key] for key in row if not any(part in key for part in _VARYING)} for row in rows]


def _uses_of_devices(folder: Path) -> list[tuple[int, list[int]]]:
    """Return how often each rank has waited in each launch, and on which devices it has had memory."""
    files = sorted(folder.glob(f"{DEVICES_FILE}*"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def difference(result: Result, expected: Result, *, counts_costs: bool = True) -> str:
    """Return what a result shows that the unchanged program's does not: a fault, or other metrics; "" for none.

    Without ``counts_costs`` the host may wait more or less often, and memory may differ.
    """
    if result.fault:
        return result.fault
    if len(result.metrics) != len(expected.metrics):
        return f"{len(result.metrics)} lines of metrics instead of {len(expected.metrics)}"
    for found, known in zip(result.metrics, expected.metrics):
        compared = [key for key in {**known, **found} if counts_costs or key != MEMORY]
        changed = [key for key in compared if found.get(key) != known.get(key)]
        if changed:
            key = changed[0]
            return f"{key} is {found.get(key)} instead of {known.get(key)}"
    if counts_costs and result.host_waits != expected.host_waits:
        return f"the host waits for its device {result.host_waits} times instead of {expected.host_waits}"
    if result.devices != expected.devices:
        return f"ranks have memory on the devices {result.devices} instead of {expected.devices}"
    return ""
