"""A watchdog around a part of a process: how one is begun and ended, and what tells it where the process stands."""

from __future__ import annotations

import dataclasses
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_objects, any_rank, broadcast_object
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import ParallelState
from megatron.training.process.console import print_line
from megatron.training.process.hang.locked_stacks import StackFile
from megatron.training.process.hang.node_board import NodeBoard, enter, node_folder, processes_in
from megatron.training.process.hang.patience import Patience
from megatron.training.process.hang.processes import this_process
from megatron.training.process.hang.rank_state import RankState
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
    first ``settling`` iterations may be long. If a node cannot reach the store, rank 0 warns that nothing is watched.
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
    prefix = broadcast_object(uuid.uuid4().hex, state.world)
    folder_of_node = node_folder(prefix, this_process().machine)
    trouble = _trouble_of(partial(enter, folder_of_node, RankState(state.rank, this_process())))
    if _warns(trouble, state):
        return None
    # All have entered: who shares the folder is of this node.
    names = processes_in(folder_of_node)
    first = torch.tensor([min(names)], device=device.torch_device)
    node_of = all_gather_first_dim(first, state.world).tolist()
    board = NodeBoard(state.rank, folder_of_node, node_of, prefix, connect_store)
    trouble = _trouble_of(board.open) if min(names) == state.rank else ""
    if _warns(trouble, state):
        board.remove()
        return None
    surroundings = Surroundings(
        rank=state.rank,
        num_ranks=state.world.size,
        names=names,
        folder=None if folder is None else Path(folder),
        error_file=launcher_error_file(),
        stack_file=stack_file,
        count_failure=is_first_failure if leave_with == 1 else lambda: None,
        device=lambda: _describe(device),
        attend=device.make_current,
        abort=partial(_give_up, recorder),
        leave=lambda status: os._exit(leave_with),
    )
    return Watchdog(board, recorder, patience, surroundings, min(_LONGEST_BEAT_S, patience.silence_s / _BEATS))


def _trouble_of(action: Callable[[], object]) -> str:
    """Return why an action of this rank fails, "" if it does not."""
    try:
        action()
    except (ConfigurationError, OSError) as error:
        return str(error)
    return ""


def _warns(trouble: str, state: ParallelState) -> bool:
    """Return whether any rank has trouble, which rank 0 then says; collective."""
    if not any_rank(bool(trouble), state.world):
        return False
    reports = [(rank, each) for rank, each in enumerate(all_gather_objects(trouble, state.world)) if each]
    if state.rank == 0:
        rank, reason = reports[0]
        print_line(
            f"WARNING: no hang is watched for or reported: rank {rank}: {reason}; only --distributed-timeout-minutes "
            "ends one",
            sys.stderr,
        )
    return True


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
