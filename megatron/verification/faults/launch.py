"""One start of a training command: its processes, what it printed, and how far it is."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError, MegatronError
from megatron.training.fault_tolerance.processes import ProcessIdentity
from megatron.verification.faults.process_tree import descendants, end_all, identities, ranks_of

POLL_S = 0.1
_TRAINS = "[before the start of training step]"
_LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")
_TAIL_LINES = 3


class LaunchError(MegatronError):
    """Report a run that did not do what it should without a fault: start, train, or end."""


class Launch:
    """Run a command in a session of its own, with its output in a file, from here to `close`.

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
        """Return what it printed."""
        return self.output.read_text(errors="replace")

    @property
    def resumed_at(self) -> int:
        """Return the iteration of the checkpoint that it loaded; 0 for none."""
        match = _LOADED.search(self.text)
        return int(match.group(1)) if match else 0

    def iteration(self) -> int:
        """Return the newest iteration in the metrics file."""
        return max(losses(self._metrics), default=0)

    def ranks(self) -> dict[int, int]:
        """Return the processes of its ranks here, by rank."""
        return ranks_of(self.process.pid)

    def look(self) -> int | None:
        """Note which processes there are; return the exit status once the command has ended."""
        self.seen |= identities(descendants(self.process.pid))
        return self.process.poll()

    def wait_until_it_trains(self, patience_s: float) -> bool:
        """Wait for the first step; return False where the command ends before that.

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
        """Wait for the end, which must be a success.

        Raises:
            LaunchError: it took longer than ``patience_s``, or ended with another status than 0.
        """
        status = self.wait(patience_s)
        if status:
            raise LaunchError(f"the command ended with status {status}{self._tail()}")

    def left_after(self, seconds: float) -> list[int]:
        """Return which of its processes still run so long after it; fewer seconds pass where none does."""
        deadline = time.monotonic() + seconds
        while any(process.is_alive for process in self.seen) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return sorted(process.pid for process in self.seen if process.is_alive)

    def close(self) -> None:
        """Kill whatever still runs."""
        self.look()
        end_all(self.seen)
        self.process.wait()

    def _tail(self) -> str:
        """Return what it said last, before its launcher did, and where all of it is."""
        lines, launchers, _ = self.text.partition("torch/distributed/elastic")
        last = lines.splitlines()[: -1 if launchers else None]
        return f"; {self.output} ends with: {'; '.join(last[-_TAIL_LINES:])}"


def losses(metrics: Path) -> dict[int, Any]:
    """Return the loss of each iteration in a metrics file; a line that a kill tore says nothing."""
    found: dict[int, Any] = {}
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "split" not in values and "iteration" in values:
            found[values["iteration"]] = values.get("lm_loss")
    return found
