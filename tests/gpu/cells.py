"""Verification cells on devices of any kind: each rank on a device of its own, over the backend that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

import pretrain_gpt
from megatron.core.device import Device
from megatron.verification.cells import Cell, matrix
from megatron.verification.model_cells import expert_matrix
from megatron.verification.run_cell import CellResult, run_cell
from megatron.verification.training_cells import sharding_matrix
from megatron.verification.verifier import TOLERANCES, CellReport, Verifier
from megatron.verification.worker_pool import WorkerPool

CELL_TIMEOUT_S = 300.0


def fitting_cells(num_devices: int, dtype: str) -> list[Cell]:
    """Return the cells that need no more ranks than there are devices: dense models, also with FSDP, and experts.

    Experts are left out below float64: two of them whose scores are close are chosen by rounding.
    """
    experts = expert_matrix() if dtype == "float64" else []
    return [cell for cell in (*matrix(), *sharding_matrix(), *experts) if cell.world_size <= num_devices]


def run_on_cpu(flags: Sequence[str], world_size: int, data: str, dtype: str, *providers: Any) -> CellResult:
    """Run a cell's rank on the CPU."""
    return run_cell(flags, world_size, data, dtype, providers[0], providers[1], Device("cpu"))


def run_on_cuda(flags: Sequence[str], world_size: int, data: str, dtype: str, *providers: Any) -> CellResult:
    """Run a cell's rank on the CUDA device of its number."""
    device = Device("cuda", dist.get_rank() if dist.is_initialized() else 0)
    device.make_current()
    return run_cell(flags, world_size, data, dtype, providers[0], providers[1], device)


def share_first_gpu(rank: int) -> int:
    """Set the environment in which NCCL accepts ranks on one GPU, and return that device for every rank.

    NCCL rejects two ranks of one host on a GPU. Those of different hosts communicate over a network interface, here the
    loopback interface.
    """
    os.environ["NCCL_HOSTID"] = f"rank {rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return 0


def run_on_shared_gpu(flags: Sequence[str], world_size: int, data: str, dtype: str, *providers: Any) -> CellResult:
    """Run a cell's rank on the first CUDA device, which its peers have too."""
    device = Device("cuda", 0)
    device.make_current()
    result = run_cell(flags, world_size, data, dtype, providers[0], providers[1], device)
    device.synchronize()
    return result


def check_cells(
    cells: Sequence[Cell],
    device_kind: str,
    dtype: str,
    add: Callable[[dict[str, Any]], None],
    timeout_s: float = CELL_TIMEOUT_S,
) -> list[str]:
    """Check the cells, add a row for each, and return the descriptions of those that did not pass."""
    job = run_on_cuda if device_kind == "cuda" else run_on_cpu
    bad = []
    with WorkerPool(max(cell.world_size for cell in cells), timeout_s, Device(device_kind).default_backend) as pool:
        # Dense models have fixed tolerances: one reference process takes less time than many that measure errors.
        verifier = Verifier(
            pool, pretrain_gpt.provide_model, pretrain_gpt.forward_step, dtype, TOLERANCES[dtype], job=job
        )
        for cell in cells:
            found = verifier.check(cell)
            add(to_row(found, dtype))
            if found.outcome != "passed":
                bad.append(found.describe())
    return bad


def to_row(found: CellReport, dtype: str) -> dict[str, Any]:
    """Return a cell's outcome for the report."""
    loss, norm, gradient, parameter = found.differences
    return {
        "name": f"{found.cell.name} {dtype}",
        "outcome": found.outcome,
        "loss": loss,
        "norm": norm,
        "gradient": gradient,
        "parameter": parameter,
        "reasons": list(found.reasons),
    }
