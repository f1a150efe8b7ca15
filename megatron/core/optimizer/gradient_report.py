"""What is wrong with the gradients of a step whose norm is not finite, in words, for all ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.weight_checks import (
    BadWeightsError,
    describe_bad_weights,
    find_bad_weights,
    gather_bad_weights,
)
from megatron.core.process_group import Group

_NUM_NAMED = 4
_NUM_RANKS_NAMED = 8


def check_weights(model_chunks: Sequence[DistributedDataParallel], world: Group) -> None:
    """Look the weights of all ranks over; collective, and it waits for the device.

    Raises:
        BadWeightsError: some are not finite; the message names parameters, ranks and elements. All ranks raise.
    """
    for chunk in model_chunks:
        chunk.finish_param_gather()
    local = find_bad_weights(parameter for chunk in model_chunks for parameter in chunk.parameters())
    found = gather_bad_weights(local, world)
    if found:
        raise BadWeightsError(
            f"weights are not finite: {describe_bad_weights(found)}; no iteration can mend them: go on from a "
            "checkpoint before, with --ckpt-step"
        )


def describe_bad_gradients(model_chunks: Sequence[DistributedDataParallel], world: Group, loss_scale: float) -> str:
    """Return what the reduced gradients are, and which parameters' were not finite before, by rank; collective.

    Finite gradients whose squares overflow are called too large, with the largest values.
    """
    bad = [name for chunk in model_chunks for name in chunk.names_of_bad_local_gradients()]
    parts = [part for chunk in model_chunks for part in chunk.parts if part.gradient.numel()]
    largest = [(part.spec.name, float(part.gradient.abs().max()) / loss_scale) for part in parts]
    is_finite = all(bool(torch.isfinite(part.gradient).all()) for part in parts)
    reports = all_gather_objects((bad, is_finite, sorted(largest, key=lambda each: -each[1])[:_NUM_NAMED]), world)
    if all(finite for _, finite, _ in reports):
        values: dict[str, float] = {}
        for _, _, top in reports:
            for name, value in top:
                values[name] = max(value, values.get(name, 0.0))
        named = sorted(values.items(), key=lambda each: -each[1])[:_NUM_NAMED]
        return (
            "the gradient is too large: every element of it is finite, and its norm has overflowed; the largest "
            f"elements are {', '.join(f'{value:.3g} in {name}' for name, value in named)}"
        )
    ranks = [
        f"rank {rank}: {', '.join(names[:_NUM_NAMED])}"
        + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")
        for rank, (names, _, _) in zip(world.ranks, reports)
        if names
    ]
    where = "; ".join(ranks[:_NUM_RANKS_NAMED]) or "each was finite on its rank, but their sum is not"
    return f"a gradient is not finite before the optimizer step; {where}"
