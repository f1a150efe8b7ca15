"""The end of a run that hangs: every process of a machine leaves, and those are killed that cannot."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.training.process.hang.processes import is_at_an_end, kill, state_of
from megatron.training.process.hang.surroundings import Surroundings

_ENDING_S = 3.0
_POLL_S = 0.05


def end_ranks(word: Mapping[str, Any], around: Surroundings, leads: bool, beat_s: float) -> None:
    """End this process with status 1, and those of its machine that cannot do it themselves.

    ``word`` is what the leader says: the culprit, its error file and what to write there, and the ranks to kill. The
    leader leaves last, and kills who is left of its machine.
    """
    names = around.names
    if word["culprit"] in names:
        _explain(word["error_file"], word["message"], word["since"])
    for rank in word["kill"]:
        if rank in names:
            kill(names[rank])
    if leads:
        others = [name for rank, name in names.items() if rank != around.rank]
        deadline = time.monotonic() + _ENDING_S + beat_s
        while time.monotonic() < deadline and not all(is_at_an_end(state_of(name)) for name in others):
            time.sleep(_POLL_S)
        for name in others:
            kill(name)
    aborting = threading.Thread(target=around.abort, daemon=True)
    aborting.start()
    aborting.join(_ENDING_S)
    around.leave(1)


def _explain(error_file: str, message: str, since: float) -> None:
    """Write the reason to where torchrun reads it: it names the process whose reason is the oldest."""
    if not error_file:
        return
    text = f"HANG: {message}"
    reason = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(since))}}}
    try:
        Path(error_file).write_text(json.dumps(reason))
    except OSError:
        return
