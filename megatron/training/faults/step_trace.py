"""What each rank computed of one step, to be compared with what it computes of it another time."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.layer_output import LayerOutput
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss

_TOLERANCE = 1.0e-3
"""Relative difference up to which two figures pass for one: kernels that add in any order differ by less."""


@dataclass(frozen=True)
class RankTrace:
    """Hold the figures of one rank: a sum for each chunk and micro-batch, and the norm of its own gradients.

    ``forward`` has the loss of the last chunk and the sum of absolute hidden states of every other one, before anything
    is exchanged. ``gradient`` is the norm before it is reduced, None where that is not known.
    """

    rank: int
    host: str
    place: Mapping[str, int]
    forward: Mapping[tuple[int, int], float]
    gradient: float | None

    def stage_values(self, chunk: int) -> list[float]:
        """Return the figures of one chunk, micro-batch by micro-batch."""
        return [value for (of, _), value in sorted(self.forward.items()) if of == chunk]


class StepTrace:
    """Note what a rank's chunks make of the micro-batches of a step; nothing waits for the device."""

    def __init__(self) -> None:
        self._forward: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Begin a computation anew."""
        self._forward = {}

    def note(self, chunk: int, microbatch: int, result: ChunkResult) -> None:
        """Note one result."""
        if isinstance(result, MicrobatchLoss):
            figure = result.loss_sum.detach()
        else:
            hidden = result.hidden if isinstance(result, LayerOutput) else result
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            figure = torch.linalg.vector_norm(hidden.detach(), ord=1, dtype=dtype)
        self._forward[chunk, microbatch] = figure

    def gather(self, chunks: Sequence[DistributedDataParallel], state: ParallelState) -> list[RankTrace]:
        """Return the figures of all ranks; collective, and the host waits for the device."""
        gradient = None
        if all(chunk.config.check_for_nan_in_loss_and_grad for chunk in chunks):
            gradient = math.sqrt(sum(norm * norm for chunk in chunks for _, norm in chunk.local_grad_norms()))
        forward = {key: float(figure) for key, figure in self._forward.items()}
        return all_gather_objects(
            RankTrace(state.rank, platform.node(), dict(state.place), forward, gradient), state.world
        )


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two figures are of the same computation: equal but for rounding, or both not finite."""
    if one is None or other is None:
        return one is other
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))


def ranks_that_differ(first: Sequence[RankTrace], second: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the ranks at which two computations of a step part, the first in the order of the data.

    In the forward pass a fault goes from stage to stage, in the backward pass back: of the ranks whose figures differ
    those are returned that no other has handed the difference to.
    """
    places = sorted({(chunk, trace.place["pp"]) for trace in first for chunk, _ in trace.forward})
    for chunk, stage in places:
        found = [
            one
            for one, other in zip(first, second, strict=True)
            if one.place["pp"] == stage and not all(map(is_same, one.stage_values(chunk), other.stage_values(chunk)))
        ]
        if found:
            return found
    differing = [one for one, other in zip(first, second, strict=True) if not is_same(one.gradient, other.gradient)]
    last = max((trace.place["pp"] for trace in differing), default=0)
    return [trace for trace in differing if trace.place["pp"] == last]


def ranks_not_finite(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the ranks at which a computation stopped being finite, the first in the order of the data."""
    marked = [
        dataclasses.replace(
            each,
            forward={key: _mark(value) for key, value in each.forward.items()},
            gradient=None if each.gradient is None else _mark(each.gradient),
        )
        for each in traces
    ]
    clean = [
        dataclasses.replace(
            each,
            forward=dict.fromkeys(each.forward, 0.0),
            gradient=None if each.gradient is None else 0.0,
        )
        for each in traces
    ]
    return ranks_that_differ(marked, clean)


def _mark(value: float) -> float:
    return 0.0 if math.isfinite(value) else math.nan


def describe_ranks(traces: Sequence[RankTrace]) -> str:
    """Return ranks with their hosts in words."""
    if not traces:
        return "a rank that cannot be told from the others"
    named = ", ".join(f"rank {trace.rank} on {trace.host}" for trace in traces)
    return named if len(traces) == 1 else f"one of {named}, which cannot be told apart"
