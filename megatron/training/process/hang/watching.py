"""A watchdog around a part of a process: how one is begun and ended, and what tells it where the process stands."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.collectives import all_gather_objects
from megatron.core.device import Device
from megatron.core.flight.recorder import FlightRecorder
from megatron.core.parallel_state import ParallelState
from megatron.training.process.hang.locked_stacks import StackFile
from megatron.training.process.hang.patience import Patience
from megatron.training.process.hang.processes import this_process
from megatron.training.process.hang.surroundings import Surroundings
from megatron.training.process.hang.watchdog import Watchdog
from megatron.training.process.initialize import (
    abort_communication,
    connect_store,
    is_first_failure,
    launcher_error_file,
)

_LONGEST_BEAT_S = 1.0
_BEATS = 10
# What each timer of a run is the beginning of; the others lie within these.
_PHASES: Mapping[str, str] = {
    "model-and-optimizer-setup": "setup",
    "train/valid/test-data-iterators-setup": "setup",
    "load-checkpoint": "load",
    "forward-backward": "forward",
    "batch-generator": "data",
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "gradients",
    "optimizer": "optimizer",
    "evaluate": "evaluate",
    "save-checkpoint": "save",
}


def phase_marker(recorder: FlightRecorder, mark_phase: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """Return what is told the name of each timer that a run asks for; ``mark_phase`` is told of the phases."""

    def mark(timer: str) -> None:
        phase = _PHASES.get(timer)
        if phase is not None:
            recorder.enter(phase)
            if mark_phase is not None:
                mark_phase(phase)

    return mark


@contextmanager
def watching(
    recorder: FlightRecorder,
    state: ParallelState,
    device: Device,
    seconds: int | None,
    folder: str | None = None,
    settling: int = 1,
    leave_with: int = 1,
) -> Iterator[None]:
    """Watch this rank inside the context, on all ranks; a hang ends the process with the status ``leave_with``.

    ``seconds`` is ``--hang-report-seconds``, with which 0 watches nothing. Reports are kept in ``folder``, and the
    first ``settling`` iterations may be long. Nothing is watched where the processes have no store to meet at.
    """
    if seconds == 0:
        yield
        return
    with closing(StackFile()) as stack_file:
        patience = Patience(recorder, seconds, settling, device.has_work_left)
        watchdog = _open(recorder, state, device, patience, folder, stack_file.path, leave_with)
        is_over = False
        if watchdog is not None:
            recorder.mark = device.marker()
        try:
            yield
            is_over = True
        finally:
            if watchdog is not None:
                watchdog.close(is_over)
                recorder.mark = None


def _open(
    recorder: FlightRecorder,
    state: ParallelState,
    device: Device,
    patience: Patience,
    folder: str | None,
    stack_file: str,
    leave_with: int,
) -> Watchdog | None:
    store = connect_store()
    told = all_gather_objects((this_process(), uuid.uuid4().hex, store is not None), state.world)
    if store is None or not all(is_connected for _, _, is_connected in told):
        return None
    surroundings = Surroundings(
        rank=state.rank,
        names=[name for name, _, _ in told],
        prefix=told[0][1],
        folder=None if folder is None else Path(folder),
        error_file=launcher_error_file(),
        stack_file=stack_file,
        count_failure=is_first_failure if leave_with == 1 else lambda: None,
        device=lambda: _describe(device),
        attend=device.make_current,
        abort=partial(_give_up, recorder),
        leave=lambda status: os._exit(leave_with),
    )
    return Watchdog(store, recorder, patience, surroundings, min(_LONGEST_BEAT_S, patience.silence_s / _BEATS))


def _give_up(recorder: FlightRecorder) -> None:
    recorder.give_up()
    abort_communication()


def _describe(device: Device) -> dict[str, Any]:
    """Return the state of a device, or why it does not tell."""
    try:
        use = dataclasses.asdict(device.memory_use())
        return {"device": str(device.torch_device), "memory_mib": use, "queue": device.queue_state()}
    except (OSError, RuntimeError) as error:
        return {"device": str(device.torch_device), "error": str(error)}
