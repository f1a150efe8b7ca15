"""Cells of ``tools/verify_parallelism.py`` on emulated devices: each rank is a device, and NCCL connects them.

A cell is compared with one process on the CPU in the same dtype. In bfloat16 a cell of several ranks is compared with
one emulated device: CUDA branches round elsewhere than CPU branches, and Adam's first steps amplify the rounding. Cells
of one rank compare the device with the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

import pretrain_gpt
from megatron.core.device import Device
from megatron.training.model_setup import ModelProvider
from megatron.training.training_step import ForwardStep
from megatron.verification.cells import Cell
from megatron.verification.run_cell import CellResult, run_cell
from megatron.verification.verifier import NOT_HELD, Tolerance, Verifier
from megatron.verification.worker_pool import Job, WorkerPool
from tests.emulated_cuda.activation import load_bindings

_TIMEOUT_S = 600.0
TOLERANCES = {
    # Both sides round differently: CUDA branches and Triton programs compute by other formulas. The first losses and
    # gradients are as close as those of CPU layouts, and Adam's steps enlarge what is left.
    "float32": Tolerance(loss=1e-5, norm=3e-4, gradient=3e-5, parameter=NOT_HELD),
}
"""What is allowed by default between emulated devices and the CPU, if it is more than between processes on the CPU."""


def run_on_emulated_device(
    flags: Sequence[str],
    world_size: int,
    data: str,
    dtype: str,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
) -> CellResult:
    """Run a cell's rank on the emulated device of its number."""
    device = Device("cuda", dist.get_rank() if dist.is_initialized() else 0)
    device.make_current()
    result = run_cell(flags, world_size, data, dtype, model_provider, forward_step, device)
    device.synchronize()
    return result


def end_cell() -> list[str]:
    """Return and forget what this process has reported, and leave its devices as new.

    A report whose exception was caught is among them.
    """
    core = load_bindings()
    problems = []
    try:
        for device in range(core.device_count()):
            core.synchronize_device(device)
        core.empty_cache()
    except RuntimeError as error:
        problems.append(str(error))
    reports = core.reports()
    core.clear_reports()
    return [*reports, *(problem for problem in problems if not any(report in problem for report in reports))]


def _reference_job(dtype: str, cell: Cell) -> Job:
    return run_on_emulated_device if dtype == "bfloat16" and cell.world_size > 1 else run_cell


@contextmanager
def emulated_verifier(size: int, dtype: str, tolerance: Tolerance | None = None) -> Iterator[Verifier]:
    """Yield a verifier of cells of up to ``size`` ranks; this process must have the emulator's environment."""
    # This process imports torch, computes nothing and has one thread: a server of forks would import torch once more.
    with WorkerPool(size, _TIMEOUT_S, "nccl", end_cell, forks=True) as pool:
        yield Verifier(
            pool,
            pretrain_gpt.provide_model,
            pretrain_gpt.forward_step,
            dtype,
            TOLERANCES.get(dtype) if tolerance is None else tolerance,
            job=run_on_emulated_device,
            reference_job=partial(_reference_job, dtype),
        )
