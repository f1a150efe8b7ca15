"""Cells with fewer samples per step."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron.verification.cells import BASE_FLAGS, Cell

_NUM_REPLICAS = re.compile(r" dp(\d+)")


def small(cell: Cell) -> Cell:
    """Return the cell with fewer samples per step, unless it has sizes of its own.

    Each replica has two micro-batches, or four if it is the only one and a pipeline. Cells have eight samples per step.
    """
    if any(flag in cell.flags[len(BASE_FLAGS) :] for flag in ("--micro-batch-size", "--global-batch-size")):
        return cell
    found = _NUM_REPLICAS.search(cell.name)
    assert found is not None, cell.name
    num_samples = max(2 if " pp1 " in cell.name else 4, 2 * int(found[1]))
    if num_samples >= 8:
        return cell
    return replace(cell, model_flags=(*cell.model_flags, "--global-batch-size", str(num_samples)))
