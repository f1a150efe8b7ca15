"""What a watchdog is given of its process and its run: names, files, and what it may call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.process.hang.processes import ProcessName


@dataclass(frozen=True)
class Surroundings:
    """Hold what a watchdog is told of its process and its run.

    ``names`` are the processes of this node's ranks, by rank. ``folder`` is where reports are kept, ``error_file``
    where the launcher reads why a process failed, ``stack_file`` where this one writes its stacks if it cannot answer.
    ``count_failure`` tells the run that it has failed, ``device`` describes the device, which ``attend`` makes that of
    a thread, ``abort`` gives up what it communicates, and ``leave`` ends the process with a status.
    """

    rank: int
    num_ranks: int
    names: Mapping[int, ProcessName]
    folder: Path | None = None
    error_file: str = ""
    stack_file: str = ""
    count_failure: Callable[[], object] = lambda: None
    device: Callable[[], Mapping[str, Any]] = dict
    attend: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
    leave: Callable[[int], object] = os._exit

    @property
    def process(self) -> ProcessName:
        """Return the name of this rank's process."""
        return self.names[self.rank]
