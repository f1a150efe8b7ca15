"""Part 10: layouts of two and four ranks that share the GPU, connected by NCCL, each against one process on the CPU."""

from __future__ import annotations

import itertools
import random

import pretrain_gpt
from megatron.verification.cells import Cell
from megatron.verification.run_cell import run_cell
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool
from tests.gpu.cells import fitting_cells, run_on_shared_gpu, share_first_gpu, to_row
from tests.gpu.window.parts.layouts import write_cell
from tests.gpu.window.window import Unsupported, Window

NUM_RANKS = (2, 4)
DTYPES = ("float64", "bfloat16")
_TIMEOUT_S = 60.0
_SEED = 10


def interleaved_cells() -> list[tuple[Cell, str]]:
    """Return all cells of two and four ranks with their dtypes: sizes and dtypes in turn, kinds of layouts mixed."""
    queues = []
    for size, dtype in itertools.product(NUM_RANKS, DTYPES):
        cells = [cell for cell in fitting_cells(size, dtype) if cell.world_size == size]
        random.Random(_SEED).shuffle(cells)
        queues.append([(cell, dtype) for cell in cells])
    return [each for row in itertools.zip_longest(*queues) for each in row if each is not None]


def run(window: Window) -> None:
    """Check cell after cell until the time is up."""
    if window.is_emulated:
        with window.attempt("layouts of several ranks"):
            raise Unsupported("a rank of the emulator has a device of its own; other tests check such layouts")
        return
    cells = interleaved_cells()
    with WorkerPool(max(NUM_RANKS), _TIMEOUT_S, "nccl", device_of_rank=share_first_gpu) as pool:
        verifiers = {
            dtype: Verifier(
                pool,
                pretrain_gpt.provide_model,
                pretrain_gpt.forward_step,
                dtype,
                job=run_on_shared_gpu,
                reference_job=lambda _: run_cell,
            )
            for dtype in DTYPES
        }
        for number, (cell, dtype) in enumerate(cells):
            if not window.is_time_for(f"{len(cells) - number} further layouts"):
                return
            with window.attempt(f"{cell.name} {dtype}"):
                write_cell(window, to_row(verifiers[dtype].check(cell), dtype), dtype)
