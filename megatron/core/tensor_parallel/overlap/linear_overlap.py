"""Which communication of a linear layer goes in chunks beside its products. Importing this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.model_parallel_config import ModelParallelConfig

LinearName = Literal["qkv", "proj", "fc1", "fc2", "output"]
ROW_PARALLEL: tuple[LinearName, ...] = ("proj", "fc2")
CHUNKED_METHODS = ("ring_exchange", "pipeline")
"""Names by which a file of --tp-comm-overlap-cfg asks for chunks."""


@dataclass(frozen=True)
class LinearOverlap:
    """Say how a linear layer communicates under sequence parallelism.

    ``forward`` and ``backward`` send in chunks what enters or leaves the product of the output and of the input
    gradient: a column-parallel layer's gathered input and scattered input gradient, a row-parallel layer's scattered
    output and gathered output gradient. ``bulk_gather`` lets a column-parallel layer's input be gathered once more
    while the input gradient is computed, and ``bulk_scatter`` lets the input gradient be scattered while the weight's
    gradient is. ``uses_symmetric_memory`` leaves chunks to torch's symmetric memory.
    """

    forward: bool = False
    backward: bool = False
    bulk_gather: bool = True
    bulk_scatter: bool = True
    uses_symmetric_memory: bool = False


WHOLE = LinearOverlap()
"""Nothing goes in chunks."""


def linear_overlap(config: ModelParallelConfig, name: LinearName) -> LinearOverlap:
    """Return how a layer's linear map communicates, by the configuration's switches and its file's methods."""
    if not config.tp_comm_overlap:
        return WHOLE
    methods = dict(entry.split("=") for entry in config.tp_comm_overlap_methods)

    def is_chunked(product: str, default: bool) -> bool:
        method = methods.get(f"{name}_{product}")
        return default if method is None else method in CHUNKED_METHODS

    gathers, scatters = config.tp_comm_overlap_ag, config.tp_comm_overlap_rs
    if name in ROW_PARALLEL:
        forward, backward = scatters and is_chunked("fprop", True), gathers and is_chunked("dgrad", True)
    else:
        forward = gathers and is_chunked("fprop", True)
        backward = is_chunked("dgrad", config.tp_comm_overlap_rs_dgrad)
    has_chunks = config.tp_comm_overlap_impl != "whole"
    return LinearOverlap(
        forward=forward and has_chunks,
        backward=backward and has_chunks,
        bulk_gather=config.tp_comm_bulk_dgrad,
        bulk_scatter=config.tp_comm_bulk_wgrad,
        uses_symmetric_memory=config.tp_comm_overlap_impl == "symmetric-memory",
    )
