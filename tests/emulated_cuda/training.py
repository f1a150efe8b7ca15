"""Trainings on emulated devices, in ranks that are forked from a process that has imported torch with the emulator."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.emulated_cuda.activation import load_bindings
from tests.emulated_cuda.environment import emulated_environment
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import NO_FAULTS, ForkedRun, fork_training

NUM_DEVICES = 4
TIMEOUT_S = 600.0
STATUS_OF_REPORTS = 86
COUNTS_TITLE = "operators of emulated devices: "


@functools.cache
def settings(gpu: str, *, triton: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the variables that a process needs before it imports torch."""
    variables = emulated_environment(NUM_DEVICES, gpu, triton=triton)
    return tuple(sorted((name, value) for name, value in variables.items() if os.environ.get(name) != value))


def run_on_device(argv: Sequence[str], faults: Faults) -> int:
    """Do what ``pretrain_gpt.py`` does on the emulated device of this rank, and return the exit status.

    A report makes it 86. How often each operator has run is printed.
    """
    del os.environ["MEGATRON_DEVICE"]
    core = load_bindings()
    status = 0
    try:
        status = run_with_faults(argv, faults)
    except SystemExit as ending:
        status = int(ending.code or 0)
    print(COUNTS_TITLE + json.dumps(core.operation_counts()))
    for report in core.reports():
        print(report, file=sys.stderr)
    return STATUS_OF_REPORTS if core.reports() else status


def train_on_device(
    args: Sequence[str | Path],
    nproc: int = 1,
    gpu: str = "h100",
    faults: Faults = NO_FAULTS,
    *,
    triton: bool = False,
) -> ForkedRun:
    """Train with the command line of ``pretrain_gpt.py`` on emulated devices; fail with the output on an error."""
    return fork_training(args, nproc, faults, TIMEOUT_S, run_on_device, settings(gpu, triton=triton)).check()


def launches_of(run: ForkedRun) -> dict[str, int]:
    """Return how often rank 0 has launched each operator on its device."""
    line = next(line for line in run.stdout.splitlines() if line.startswith(COUNTS_TITLE))
    counts: dict[str, int] = json.loads(line.removeprefix(COUNTS_TITLE))
    return counts


def operators_of(run: ForkedRun) -> set[str]:
    """Return the names of the operators that rank 0 has launched on its device."""
    return set(launches_of(run))
