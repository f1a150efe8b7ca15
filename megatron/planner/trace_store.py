"""Get traces from memory or from the cache folder, or take them.

File names in the cache folder contain a hash of the sources, of torch's version and of each request. If torch is
already imported, a worker process takes the traces. The worker starts without torch, reads requests from its standard
input and prints traces as lines of JSON. Output of libraries goes to its standard error.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.config_base import field_specs, field_value
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.registry import is_registered, registered_scripts
from megatron.planner.simulation import load_fake_cuda
from megatron.planner.traces import (
    FEWEST_SAMPLES,
    OPERATION_FIELDS,
    PieceMemory,
    PieceTrace,
    Sent,
    TraceRequest,
    request_from_json,
    request_to_json,
)
from megatron.training import import_script, keep_arguments, kept_arguments

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = ("core", "planner")
"""Folders of sources on which a trace may depend."""


class UntraceableError(ConfigurationError):
    """The layers of a model raise an error on the simulated GPU."""


class TraceStore:
    """Traces of pieces, cached in this process and in a folder; in the process only if scripts registered their parts.

    ``folder`` is by default in the folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or _default_folder()) / _sources_key()
        self._known: dict[str, Mapping[str, Any]] = {}
        self._traces: dict[str, PieceTrace] = {}
        self._failed: dict[str, UntraceableError] = {}

    def trace(self, request: TraceRequest) -> PieceTrace:
        """Return the trace of one piece.

        Raises:
            UntraceableError: the model raises an error, which further calls raise again.
            ConfigurationError: this node cannot simulate CUDA, or the folder of the traces cannot be written.
        """
        if request.key in self._failed:
            raise self._failed[request.key]
        if request.key not in self._traces:
            try:
                records = self._records(request.traced)
                if not _have_same_operations(records):
                    # Blockwise attention, for example, has more operations for larger micro-batches.
                    records = self._records([request])
            except UntraceableError as error:
                self._failed[request.key] = error
                raise
            self._traces[request.key] = _trace_of(records, request.micro_batch_size)
        return self._traces[request.key]

    def _records(self, requests: Sequence[TraceRequest]) -> list[Mapping[str, Any]]:
        """Return the record of each request; records that are not cached are taken now."""
        missing = {request.key: request for request in requests if request.key not in self._known}
        for key in list(missing):
            path = self._folder / f"{key}.json"
            if not _has_registered(missing[key]) and path.exists():
                self._known[key] = json.loads(path.read_text(encoding="utf-8"))
                del missing[key]
        if missing:
            self._known |= self._take(missing)
        return [self._known[request.key] for request in requests]

    def _take(self, missing: Mapping[str, TraceRequest]) -> Mapping[str, Mapping[str, Any]]:
        given = [{"key": key, "request": request_to_json(request)} for key, request in missing.items()]
        if _may_trace_here():
            from megatron.planner.simulation import load_fake_cuda

            load_fake_cuda()
            from megatron.planner.simulation import take_traces

            try:
                taken: Mapping[str, Mapping[str, Any]] = take_traces(missing)
            except Exception as error:
                raise UntraceableError(_reason(error)) from error
        else:
            taken = _take_elsewhere(given)
        try:
            self._write({key: record for key, record in taken.items() if not _has_registered(missing[key])})
        except OSError as error:
            raise ConfigurationError(
                f"traces of the model cannot be written to {self._folder}: {error.strerror}; set TMPDIR to a writable "
                "folder"
            ) from error
        return taken

    def _write(self, taken: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise ConfigurationError(f"{self._folder} belongs to another user; set TMPDIR to a different folder")
        for key, record in taken.items():
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(file.name, self._folder / f"{key}.json")


def trace_in_this_process() -> None:
    """Let this process take traces itself, so that torch is imported once, unless it has already imported torch.

    If this node cannot simulate CUDA, the error is raised by the first trace that is not cached.
    """
    from megatron.planner.simulation import load_fake_cuda

    if "torch" not in sys.modules:
        with suppress(ConfigurationError):
            load_fake_cuda()


@functools.cache
def default_store() -> TraceStore:
    return TraceStore()


def _have_same_operations(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a piece runs the same operations and sends the same messages at each traced micro-batch size."""
    shapes = {
        (
            tuple((phase, kind, itemsize) for phase, kind, itemsize, *_ in each["operations"]),
            tuple((phase, operation, *axes, size) for phase, operation, axes, size, _ in each["sent"]),
        )
        for each in records
    }
    return len(shapes) == 1


def _trace_of(records: Sequence[Mapping[str, Any]], size: int) -> PieceTrace:
    """Return a trace at a micro-batch size from its own record, or from the records at `FEWEST_SAMPLES`."""
    small, large = records[0], records[-1]
    first, second = (_operations(each) for each in (small, large))
    more = size - FEWEST_SAMPLES[0]

    def at(few: int, many: int) -> int:
        return few + more * (many - few)

    sent = tuple(
        Sent(phase, operation, tuple(axes), group_size, at(num_bytes, other[-1]))
        for (phase, operation, axes, group_size, num_bytes), other in zip(small["sent"], large["sent"])
    )
    memory = PieceMemory(*(at(few, many) for few, many in zip(small["memory"], large["memory"])))
    launches = tuple(tuple(phase) for phase in small["launches"])
    return PieceTrace(first + more * (second - first), sent, memory, launches)


def _operations(record: Mapping[str, Any]) -> np.ndarray:
    return np.array(record["operations"], dtype=float).reshape(-1, len(OPERATION_FIELDS))


def _take_elsewhere(given: Sequence[Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Take traces in a worker process, which imports torch after the library that replaces the CUDA driver.

    Raises:
        ConfigurationError: the process ends, or a trace raises an error.
    """
    worker = _worker()
    assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018 both are pipes
    try:
        worker.stdin.write(json.dumps(given) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:
        line = ""
    if not line:
        _worker.cache_clear()
        raise ConfigurationError("the layers of this model cannot be traced: the tracing process has ended")
    answer: dict[str, Any] = json.loads(line)
    if "problem" in answer:
        raise ConfigurationError(answer["problem"])
    if "error" in answer:
        raise UntraceableError(answer["error"])
    traces: Mapping[str, Mapping[str, Any]] = answer["traces"]
    return traces


def _has_registered(request: TraceRequest) -> bool:
    """Return whether a script registered parts of the model, which may change while their names do not."""
    fields = {spec.name: spec.options.registry for spec in field_specs(GPTConfig)}
    kinds = {name: kind for name, kind in fields.items() if kind is not None}
    return any(is_registered(kind, field_value(request.model, name)) for name, kind in kinds.items())


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """Return a process that takes traces until its standard input is closed, when this process ends."""
    found = [str(_PACKAGE.parent), *sys.path]
    start = f"from megatron.planner.trace_store import run_trace_worker; run_trace_worker({registered_scripts()!r})"
    program = f"import sys; sys.path[:0] = {found!r}; {start}"
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert worker.stdin is not None
    with suppress(OSError):  # a process that has ended gives no answers, which is reported
        worker.stdin.write(json.dumps(kept_arguments(), default=str) + "\n")
    return worker


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"megatron-traces-{os.getuid()}"


@functools.cache
def _sources_key() -> str:
    """Return a hash of torch's version and of the sources on which a trace depends."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for name in _SOURCES:
        for path in sorted((_PACKAGE / name).rglob("*.py")):
            digest.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _may_trace_here() -> bool:
    """Return whether this process can simulate CUDA: torch is not imported yet, or the library was loaded first."""
    from megatron.planner.simulation import load_fake_cuda

    return "torch" not in sys.modules or load_fake_cuda.cache_info().currsize > 0


def run_trace_worker(scripts: Sequence[str]) -> None:
    """Answer requests on standard input with their traces, until standard input ends.

    The scripts are imported for the parts of models that they register. These may read the arguments of the run, which
    are the first line.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    problem = ""
    keep_arguments(json.loads(sys.stdin.readline()))
    try:
        load_fake_cuda()
        for script in scripts:
            import_script(script)
    except ConfigurationError as error:
        problem = str(error)
    for line in sys.stdin:
        print(json.dumps({"problem": problem} if problem else _answer_request(line)), file=answers, flush=True)


def _answer_request(line: str) -> dict[str, object]:
    from megatron.planner.simulation import take_traces

    try:
        requests = {each["key"]: request_from_json(each["request"]) for each in json.loads(line)}
        return {"traces": take_traces(requests)}
    except Exception as error:  # noqa: BLE001 the process that sent the request raises it
        return {"error": _reason(error)}


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ConfigurationError):
        return text
    return f"the layers of this model cannot be traced: {type(error).__name__}: {text}"
