"""What can be seen of a training run: its figures, the work of its processes, its communication, files and lines.

Two runs are compared by it, so all that differs from run to run by chance (times, paths, memory) is left out. So is the
block of arguments, in which every flag is seen whether anything reads it or not.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import mmap
import os
import re
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.shared_memory import without_shared_memory
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import NO_FAULTS, fork_training

_RECORD = "what was seen: "
_COUNTED = ("garbage collection", "map of .bin")
_BY_CHANCE = ("tokens_per_second", "step_time_s", "tflops_per_device", "mfu", "memory_mib")
_ARGUMENTS = re.compile(r"^-+ arguments -+$.*?^-+ end of arguments -+$\n", re.MULTILINE | re.DOTALL)
_CHANCE_IN_LINES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d+\.\d+(E[+-]\d+)?|\b\d+(\.\d+)? (s|ms|bytes)\b")
_CHANCE_IN_NAMES = re.compile(r"(?<=tfevents)\..*|^[0-9a-f]{32}(?=-)|(?<=trace).*(?=\.json)")
_SIZED = (".safetensors", ".distcp", ".npy")


@dataclasses.dataclass(frozen=True)
class Observation:
    """Hold what was seen of a run; each aspect is compared as a whole."""

    status: int
    figures: list[dict[str, Any]]
    computation: list[dict[str, int]]
    communication: list[list[Any]]
    machine: list[list[str]]
    files: list[str]
    lines: list[str]

    def changes(self, other: Observation) -> set[str]:
        """Return the names of the aspects in which two runs differ."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name for name in names if getattr(self, name) != getattr(other, name)}


def observe(argv: Sequence[str], folder: Path, num_processes: int = 1, event: Faults = NO_FAULTS) -> Observation:
    """Run a command line that writes into ``folder`` and return what was seen of it on all ranks."""
    run = fork_training(argv, num_processes, event, program=_recorded)
    records = [_record_of(output) for output in run.outputs]
    return Observation(
        status=max(run.statuses),
        figures=[{name: line[name] for name in line if name not in _BY_CHANCE} for line in run.metrics],
        computation=[record["computation"] for record in records],
        communication=[record["communication"] for record in records],
        machine=[record["machine"] for record in records],
        files=sorted(_files(folder)),
        lines=_lines(run.stdout + "".join(run.errors), folder),
    )


def _record_of(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith(_RECORD))
    record: dict[str, Any] = json.loads(line.removeprefix(_RECORD))
    return record


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).with_name(_CHANCE_IN_NAMES.sub("", path.name)).as_posix()
        if path.suffix in _SIZED:
            yield f"{name}: {path.stat().st_size} bytes"
        elif path.parent.name == "tokenizer":
            yield f"{name}: checksum {zlib.crc32(path.read_bytes())}"
        elif "tfevents" in name:
            yield f"{name}: {', '.join(_tags(path))}"
        else:
            yield name


def _tags(path: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return [f"{tag} x {len(events.Scalars(tag))}" for tag in sorted(events.Tags()["scalars"])]


def _lines(text: str, folder: Path) -> list[str]:
    text = _ARGUMENTS.sub("", text).replace(str(folder), "FOLDER")
    return [_CHANCE_IN_LINES.sub("#", line) for line in text.splitlines() if not line.startswith(_RECORD)]


def _recorded(argv: Sequence[str], faults: Faults) -> int:
    """Do what ``pretrain_gpt.py`` does, and print what was seen of it in one line."""
    work = _Work()
    machine = collections.Counter[str]()
    if "--local-rank" in argv:
        os.environ.pop("LOCAL_RANK", None)  # the flag is for launchers that set none
    try:
        with work, _watched(argv, work, machine):
            return run_with_faults(argv, faults)
    finally:
        computation = {**work.operators, "order": work.order}
        seen = {
            "computation": computation,
            "communication": work.messages,
            "machine": [*sorted(machine), *(f"{machine[name]} x {name}" for name in _COUNTED)],
        }
        print(_RECORD + json.dumps(seen))


class _Work(TorchDispatchMode):
    """Count torch's operators, and list messages and waits, each with its bytes and the number of operators before."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: collections.Counter[str] = collections.Counter()
        self.messages: list[tuple[str, int, int]] = []
        self.order = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d"):
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.messages.append((name, num_bytes, self.operators.total()))
        else:
            self.operators[name] += 1
            self.order = zlib.crc32(name.encode(), self.order)
        return func(*args, **(kwargs or {}))


@contextmanager
def _watched(argv: Sequence[str], work: _Work, seen: collections.Counter[str]) -> Iterator[None]:
    """Note what a process asks of its machine in other ways than torch's operators."""

    def noting(words: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen[words(*args, **kwargs)] += 1
            return function(*args, **kwargs)

        return noted

    def waited(handle: dist.Work, *args: Any) -> Any:
        work.messages.append(("wait", 0, work.operators.total()))
        return wait(handle, *args)

    def started(thread: threading.Thread) -> None:
        seen[f"thread {thread.name}"] += 1
        start(thread)

    start, wait = threading.Thread.start, dist.Work.wait
    calls: list[tuple[Any, str, Callable[..., str]]] = [
        (gc, "disable", lambda: "gc off"),
        (gc, "collect", lambda *_: _COUNTED[0]),
        (mmap, "mmap", lambda number, *_, **__: f"map of {Path(os.path.realpath(f'/proc/self/fd/{number}')).suffix}"),
        (signal, "signal", lambda number, handler: f"handler of {number}"),
        (torch, "compile", lambda *args, **kwargs: "compilation"),
        (torch, "use_deterministic_algorithms", lambda *args, **kwargs: f"deterministic {args}"),
        (dist, "init_process_group", lambda *args, **kwargs: f"{kwargs['backend']} within {kwargs['timeout']}"),
        (os, "fsync", lambda *args: "fsync"),
    ]
    if "--tensorboard-dir" in argv:
        from torch.utils import tensorboard

        calls.append((tensorboard, "SummaryWriter", lambda log_dir, max_queue: f"up to {max_queue} events wait"))
    with ExitStack() as stack:
        stack.enter_context(without_shared_memory())
        stack.enter_context(patch.object(threading.Thread, "start", started))
        stack.enter_context(patch.object(dist.Work, "wait", waited))
        for owner, name, words in calls:
            stack.enter_context(patch.object(owner, name, noting(words, getattr(owner, name))))
        yield
