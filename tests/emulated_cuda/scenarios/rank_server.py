"""Fork the ranks of runs from a process that has imported torch, on emulated devices or on the CPU.

Run as ``python -m tests.emulated_cuda.scenarios.rank_server KIND``: it reads one request per line from its standard
input and writes one result per line. The modules of the project are imported with code that notes what it executes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import torch

from tests.emulated_cuda.activation import is_active, load_bindings
from tests.emulated_cuda.environment import MEMORY_VARIABLE, REPORTS_VARIABLE
from tests.emulated_cuda.scenarios.changed_source import (
    PROBE,
    REPOSITORY,
    install,
    project_files,
    with_probes,
)
from tests.emulated_cuda.scenarios.observed_calls import BUILT_IN_NAME, NONE, ObservedCalls, with_observed_calls
from tests.emulated_cuda.scenarios.running import CALLS, DEVICES_FILE, MODULES_FILE, STATEMENTS
from tests.emulated_cuda.synchronizations.calls import removable_calls
from tests.harness.free_port import free_port

_POLL_S = 0.01
_GRACE_S = 0.5
_STATUS_OF_REPORTS = 86
# What a run imports besides the project: imported once here. No backward pass may run here, whose threads a fork loses.
_MODULES = (
    *("torch.distributed.checkpoint", "torch.distributed.elastic.multiprocessing", "torch.nn.attention"),
    *("torch.utils.tensorboard", "torch.utils._triton", "torch.utils.checkpoint", "torch.optim.adamw", "torch._dynamo"),
    *("numpy.random", "numpy.ma", "safetensors"),
)


class Observation:
    """The code of all modules that note what they execute, and the shared memory in which ranks do so.

    Numbers are those of `hits.all_statements`, or those of `calls.removable_calls`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.codes: dict[str, CodeType] = {}
        self.count = 0
        if kind == STATEMENTS:
            for path in project_files():
                tree = ast.parse(_source(path))
                self.count = with_probes(tree, self.count)
                self.codes[path] = compile(tree, str(REPOSITORY / path), "exec", dont_inherit=True)
        elif kind == CALLS:
            calls = removable_calls()
            self.count = len(calls)
            for path in {call.path for call in calls}:
                own = [
                    (number, call.start, call.name_end, call.end)
                    for number, call in enumerate(calls)
                    if call.path == path
                ]
                source = with_observed_calls(_source(path), own)
                self.codes[path] = compile(source, str(REPOSITORY / path), "exec", dont_inherit=True)
        self.memory = mmap.mmap(-1, max(self.count, 1))

    def begin(self, removed: int) -> None:
        """Let this process note what it executes, and leave one call out."""
        setattr(builtins, PROBE, self.memory)
        setattr(builtins, BUILT_IN_NAME, ObservedCalls(self.memory, removed))

    def hits(self) -> list[int]:
        """Return the numbers of what was executed, and forget them."""
        found = [number for number, is_hit in enumerate(self.memory[: self.count]) if is_hit]
        self.memory[: self.count] = bytes(self.count)
        return found


def _source(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def _rank_main(request: Mapping[str, Any], rank: int, port: int, observation: Observation) -> int:
    """Run the program as one rank in this forked process and return the process's exit status."""
    folder = Path(request["folder"])
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    size = request["ranks"]
    os.environ.update(request["variables"])
    if request["memory"]:
        os.environ[MEMORY_VARIABLE] = str(request["memory"][rank])
    if size > 1:
        local_rank = request["local_ranks"][rank]
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    observation.begin(request["removed"])
    _act_at_exit(folder, rank)
    sys.argv = [request["program"], *request["arguments"]]
    status = 1
    try:
        runpy.run_path(request["program"], run_name="__main__")
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 the log has it, and the status says so
        traceback.print_exc()
    reports = load_bindings().reports() if is_active() else []
    if reports:
        print(f"emulated CUDA: {len(reports)} reports, of which the first: {reports[0]}", file=sys.stderr)
        return _STATUS_OF_REPORTS
    return status


def _act_at_exit(folder: Path, rank: int) -> None:
    """Let this process note what it has imported, on rank 0, and how often it has waited, before it ends."""
    leave, process = os._exit, os.getpid()

    def note_and_leave(status: int) -> NoReturn:
        if os.getpid() == process:
            if rank == 0:
                names = "\n".join(name for name in sys.modules if name.startswith("megatron."))
                (folder / MODULES_FILE).write_text(names)
            if is_active():
                _end_devices(folder / f"{DEVICES_FILE}{rank}")
        leave(status)

    os._exit = note_and_leave


def _end_devices(notes: Path) -> None:
    """Note what `DeviceUse` holds, and let copies end, which may report what has become of their memory."""
    core = load_bindings()
    devices = range(core.device_count())
    used = [device for device in devices if "allocation" in core.memory_counts(device)]
    with notes.open("a") as file:
        file.write(json.dumps([core.host_wait_count(), used]) + "\n")
    for device in devices:
        with contextlib.suppress(RuntimeError):  # the file of reports has it
            core.synchronize_device(device)


class _Ranks:
    """The forked ranks of a run, each the leader of a process group of its own."""

    def __init__(self, request: Mapping[str, Any], observation: Observation) -> None:
        self.statuses: dict[int, int] = {}
        self._pids: list[int] = []
        port = free_port()
        sys.stdout.flush()
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.setsid()
                    status = _rank_main(request, rank, port, observation)
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(status)
            self._pids.append(pid)

    def reap(self) -> None:
        """Note the exit statuses of ranks that have ended."""
        for rank, pid in enumerate(self._pids):
            if rank not in self.statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)

    @property
    def running(self) -> list[int]:
        """Return the process ids of the ranks that have not ended."""
        return [pid for rank, pid in enumerate(self._pids) if rank not in self.statuses]

    def kill(self) -> None:
        """End all ranks that run, and what they have started."""
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank, pid in enumerate(self._pids):
            if rank not in self.statuses:
                _, status = os.waitpid(pid, 0)
                self.statuses[rank] = os.waitstatus_to_exitcode(status)


def run(request: Mapping[str, Any], observation: Observation) -> dict[str, Any]:
    """Run a program to its end, to its first report or failure, or to its time limit.

    Where it ``may_fail`` a failure of one rank does not end the others.
    ``seconds`` are those that the ranks had a processor.
    """
    reports = Path(request["folder"]) / "reports"
    begin, used = time.monotonic(), _processor_seconds()
    ranks = _Ranks({**request, "variables": {**request["variables"], REPORTS_VARIABLE: str(reports)}}, observation)
    deadline, timed_out, failed = begin + request["limit_s"], False, False
    while ranks.running:
        ranks.reap()
        if not failed and (reports.exists() or (any(ranks.statuses.values()) and not request["may_fail"])):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            timed_out = not failed
            ranks.kill()
        time.sleep(_POLL_S)
    return {
        "statuses": [ranks.statuses[rank] for rank in range(request["ranks"])],
        "timed_out": timed_out,
        "seconds": round(_processor_seconds() - used, 2),
        "hits": observation.hits(),
    }


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def serve(kind: str) -> None:
    """Run requests until the standard input ends; ``kind`` says what is observed."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(name)
    observation = Observation(kind)
    install(observation.codes)
    observation.begin(NONE)
    for line in sys.stdin:
        request = json.loads(line)
        result = run(request, observation)
        modules = _imported_by_run(Path(request["folder"]))
        results.write(json.dumps(result) + "\n")
        # Later ranks need not import them.
        for name in modules:
            importlib.import_module(name)


def _imported_by_run(folder: Path) -> list[str]:
    """Return the modules that a run has imported and this process has not."""
    path = folder / MODULES_FILE
    names = path.read_text().splitlines() if path.exists() else []
    return [name for name in names if name not in sys.modules]


if __name__ == "__main__":
    serve(sys.argv[1])
