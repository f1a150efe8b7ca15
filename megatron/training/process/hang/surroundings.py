"""What a watchdog is given of its process and its run: a store, names, files, and what it may call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.training.process.hang.processes import ProcessName


class Store(Protocol):
    """Be the key-value store that all ranks reach."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""


@dataclass(frozen=True)
class Surroundings:
    """Hold what a watchdog is told of its process and its run.

    ``names`` are the processes of all ranks. ``folder`` is where reports are kept, ``error_file`` where the launcher
    reads why a process failed, ``stack_file`` where this one writes its stacks if it cannot answer. ``count_failure``
    tells the run that it has failed, ``device`` describes the device, which ``attend`` makes that of a thread,
    ``abort`` gives up what it communicates, and ``leave`` ends the process with a status.
    """

    rank: int
    names: Sequence[ProcessName]
    prefix: str
    folder: Path | None = None
    error_file: str = ""
    stack_file: str = ""
    count_failure: Callable[[], object] = lambda: None
    device: Callable[[], Mapping[str, Any]] = dict
    attend: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
    leave: Callable[[int], object] = os._exit
