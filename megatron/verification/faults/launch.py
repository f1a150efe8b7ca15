"""The training command under test: its folders, its processes, its output and its progress."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError, MegatronError
from megatron.training import training_script
from megatron.training.fault_tolerance import KEEPER_NAME, ProcessIdentity, identify, name_of, parent_of
from megatron.verification.faults import spoiled_script


def descendants(root: int) -> list[int]:
    """Return the descendants of a process, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(parent_of(int(name)), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def ranks_of(root: int) -> dict[int, int]:
    """Return the processes of a command's ranks on this node, by rank.

    A rank is a process with ``RANK`` in its environment whose parent does not have it or is a rank's supervisor. A
    command without such processes is rank 0.
    """
    processes = [pid for pid in descendants(root) if name_of(pid) != KEEPER_NAME]
    numbers = {pid: number for pid in processes if (number := _rank_variable(pid)) is not None}
    ranks = {number: pid for pid, number in numbers.items() if parent_of(pid) not in numbers}
    return ranks or {0: root}


def identities(pids: Iterable[int]) -> set[ProcessIdentity]:
    """Return the identities of the processes that still run."""
    return {who for who in map(identify, pids) if who.is_alive}


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(processes: Iterable[ProcessIdentity]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        if process.is_alive:
            send(process.pid, signal.SIGKILL)


def _rank_variable(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [value for value in variables if value.startswith(b"RANK=")]
    return int(values[0][5:]) if values and values[0][5:].isdigit() else None


MOST_DATA_BYTES = 2**30
_SMALL_RUN = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size 255 --init-method-std 0.06 --seed 1234 --distributed-backend gloo
    --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --split 1,0,0 --eval-iters 0
    --log-interval 1 --save-interval 5 --keep-last 3 --hang-timeout-seconds 5
"""
_SMALL_DOCUMENTS, _SMALL_DOCUMENT_TOKENS = 400, 100


@dataclass(frozen=True)
class AttackedCommand:
    """Words of a training command that accepts more flags at its end."""

    words: tuple[str, ...]

    def in_folder(self, folder: Path) -> list[str]:
        """Append ``--save``, ``--load`` and the metrics file in a folder to the command, overriding earlier flags."""
        save = str(folder / "checkpoints")
        return [*self.words, "--save", save, "--load", save, "--metrics-jsonl", str(folder / "metrics.jsonl")]

    def spoilable(self) -> AttackedCommand:
        """Return the command with its script run by `spoiled_script`.

        Raises:
            ConfigurationError: no word of it is a script.
        """
        for place, word in enumerate(self.words):
            if word.endswith(".py") and Path(word).is_file():
                words = (*self.words[:place], spoiled_script.__file__, *self.words[place:])
                return AttackedCommand(words)
        raise ConfigurationError(
            "--corrupt weight and --corrupt gradient need a command that runs a Python script, such as "
            f"pretrain_gpt.py; this command runs no script: {' '.join(self.words)}"
        )

    def with_own_data(self, folder: Path) -> tuple[AttackedCommand, tuple[Path, ...]]:
        """Return the command on copies of its data in a folder, and the copies' token files.

        Raises:
            ConfigurationError: it has no ``--data-path``, or too much data to copy.
        """
        start = self.words.index("--data-path") + 1 if "--data-path" in self.words else len(self.words)
        words = list(self.words)
        copies: list[Path] = []
        for place in range(start, len(words)):
            if words[place].startswith("--"):
                break
            source = Path(f"{words[place]}.bin")
            if not source.is_file():  # the weight of a blend
                continue
            if source.stat().st_size > MOST_DATA_BYTES:
                raise ConfigurationError(
                    f"--corrupt sample works on a copy, and {source} has {source.stat().st_size} bytes, more than "
                    f"{MOST_DATA_BYTES}; use less data"
                )
            folder.mkdir(parents=True, exist_ok=True)
            words[place] = str(folder / f"{len(copies)}")
            shutil.copyfile(source, f"{words[place]}.bin")
            shutil.copyfile(source.with_suffix(".idx"), f"{words[place]}.idx")
            copies.append(Path(f"{words[place]}.bin"))
        if not copies:
            raise ConfigurationError(
                "--corrupt sample needs a command with --data-path PREFIX, whose PREFIX.bin it copies"
            )
        return AttackedCommand(tuple(words)), tuple(copies)


def small_command(folder: Path, num_processes: int, iterations: int, flags: Sequence[str]) -> AttackedCommand:
    """Return the training command of a small model on synthetic data, which is written to a folder.

    Raises:
        OSError: the data cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "made_up"
    generator = np.random.default_rng(1)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(_SMALL_DOCUMENTS):
            builder.add_document(generator.integers(0, 255, _SMALL_DOCUMENT_TOKENS))
        builder.finalize()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    words = [sys.executable, *(launcher if num_processes > 1 else ()), str(training_script()), *_SMALL_RUN.split()]
    words += ["--train-iters", str(iterations), "--lr-decay-iters", str(iterations), "--data-path", str(prefix)]
    return AttackedCommand((*words, "--data-cache-path", str(folder / "cache"), *flags))


POLL_S = 0.1
_TRAINS = "[before the start of training step]"
_LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")
_TAIL_LINES = 3


class LaunchError(MegatronError):
    """A run without a fault did not start, train or end as it should."""


class Launch:
    """Command in its own session, with its output in a file, that runs until `close`.

    Raises:
        ConfigurationError: there is no such command.
    """

    def __init__(self, command: Sequence[str], output: Path, metrics: Path) -> None:
        self.output = output
        self._metrics = metrics
        with output.open("wb") as stream:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise ConfigurationError(
                    f"cannot start {command[0]}: {error.strerror}; change what follows --"
                ) from error
        self.seen: set[ProcessIdentity] = identities([self.process.pid])

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def resumed_at(self) -> int:
        """Return the iteration of the loaded checkpoint, or 0 without one."""
        match = _LOADED.search(self.text)
        return int(match.group(1)) if match else 0

    def iteration(self) -> int:
        return max(losses(self._metrics), default=0)

    def ranks(self) -> dict[int, int]:
        """Return the processes of the command's ranks on this node, by rank."""
        return ranks_of(self.process.pid)

    def look(self) -> int | None:
        """Record the current processes; return the exit status once the command has ended."""
        self.seen |= identities(descendants(self.process.pid))
        return self.process.poll()

    def wait_until_it_trains(self, patience_s: float) -> bool:
        """Wait for the first step; return False if the command ends before it.

        Raises:
            LaunchError: it took longer than ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while _TRAINS not in self.text:
            if self.look() is not None:
                return False
            if time.monotonic() > deadline:
                raise LaunchError(f"no training step within {patience_s:g} s{self._tail()}")
            time.sleep(POLL_S)
        return True

    def wait(self, patience_s: float) -> int:
        """Wait for the end of the command and return its exit status.

        Raises:
            LaunchError: it took longer than ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        while (status := self.look()) is None:
            if time.monotonic() > deadline:
                raise LaunchError(f"the command did not end within {patience_s:g} s{self._tail()}")
            time.sleep(POLL_S)
        return status

    def check(self, patience_s: float) -> None:
        """Wait for the end of the command, and check that it succeeded.

        Raises:
            LaunchError: it took longer than ``patience_s``, or ended with a status other than 0.
        """
        status = self.wait(patience_s)
        if status:
            raise LaunchError(f"the command ended with status {status}{self._tail()}")

    def left_after(self, seconds: float) -> list[int]:
        """Wait up to ``seconds`` for the end of the command's processes, and return those that still run."""
        deadline = time.monotonic() + seconds
        while any(process.is_alive for process in self.seen) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return sorted(process.pid for process in self.seen if process.is_alive)

    def close(self) -> None:
        """Kill all processes that still run."""
        self.look()
        end_all(self.seen)
        self.process.wait()

    def _tail(self) -> str:
        """Quote the last lines of the output, before the launcher's own, and name the file."""
        lines, launchers, _ = self.text.partition("torch/distributed/elastic")
        last = lines.splitlines()[: -1 if launchers else None]
        return f"; {self.output} ends with: {'; '.join(last[-_TAIL_LINES:])}"


def losses(metrics: Path) -> dict[int, Any]:
    """Return the loss of each iteration in a metrics file; partial lines are ignored."""
    found: dict[int, Any] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "split" not in values and "iteration" in values:
            found[values["iteration"]] = values.get("lm_loss")
    return found
