"""Part 9: the layouts of one GPU in bf16, each against the plain layout on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pretrain_gpt
from megatron.core.device import Device
from megatron.core.errors import TrainingError
from megatron.verification.cells import Cell
from megatron.verification.model_cells import attention_matrix, latent_matrix
from megatron.verification.run_cell import CellResult, run_cell
from megatron.verification.verifier import TOLERANCES, Verifier
from megatron.verification.worker_pool import Job, WorkerPool
from tests.gpu.cells import fitting_cells, to_row
from tests.gpu.window import findings
from tests.gpu.window.window import Window

DTYPE = "bfloat16"
_SMALL_COUNT = 3


class ThisProcess:
    """Run jobs of one rank in this process, which has started CUDA already; the form of a `WorkerPool`."""

    def run(self, job: Job, world_size: int, *args: Any) -> list[Any]:
        """Return what the job returned.

        Raises:
            TrainingError: the job raised, whatever it was.
        """
        assert world_size == 1, "this process is one rank"
        try:
            return [job(*args)]
        except Exception as error:
            raise TrainingError(f"{type(error).__name__}: {error}") from error


def one_gpu_cells(*, small: bool) -> list[Cell]:
    """Return the cells of one rank: of dense models, of masks and windows, and of multi-head latent attention."""
    cells = fitting_cells(1, DTYPE) + [cell for cell in (*attention_matrix(), *latent_matrix()) if cell.world_size == 1]
    return cells[:: max(1, len(cells) // _SMALL_COUNT)][:_SMALL_COUNT] if small else cells


def run(window: Window) -> None:
    """Check cell after cell until the time is up; references are computed on the CPU."""
    cells = one_gpu_cells(small=window.small)
    references = {cell.reference_flags for cell in cells}

    def job(flags: Sequence[str], world_size: int, data: str, dtype: str, *providers: Any) -> CellResult:
        device = Device("cpu") if tuple(flags) in references else window.device
        return run_cell(flags, world_size, data, dtype, providers[0], providers[1], device)

    pool = cast(WorkerPool, ThisProcess())
    verifier = Verifier(pool, pretrain_gpt.provide_model, pretrain_gpt.forward_step, DTYPE, TOLERANCES[DTYPE], job=job)
    for number, cell in enumerate(cells):
        left = len(cells) - number
        if not window.is_time_for(f"{left} further layouts"):
            return
        name = f"{cell.name} {DTYPE}"
        with window.attempt(name):
            write_cell(window, to_row(verifier.check(cell), DTYPE), DTYPE)


def write_cell(window: Window, row: dict[str, Any], dtype: str) -> None:
    """Write the outcome of a cell with its largest differences."""
    tolerance = TOLERANCES[dtype]
    status = findings.PASSED if row["outcome"] == "passed" else findings.FAILED
    known: dict[str, Any] = {"difference": row["gradient"], "tolerance": tolerance.gradient}
    known |= {"compared": f"gradients of the plain layout on the CPU; losses too, within {tolerance.loss:g}"}
    known |= {"loss_difference": row["loss"], "norm_difference": row["norm"]}
    if status == findings.FAILED:
        known["reason"] = "; ".join(row["reasons"])[:600] or row["outcome"]
    window.add(row["name"], status, **known)
