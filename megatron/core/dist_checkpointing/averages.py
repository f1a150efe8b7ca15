"""Averages of weights in a checkpoint: filled where it holds some, and begun anew where it holds none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict import AVERAGE_PREFIX, OPTIMIZER_PREFIX


@dataclass(frozen=True, eq=False)
class AverageChoice:
    """Hold the optimizer's tensors that a checkpoint fills, and the namespaces that must be filled.

    ``line`` is there where the averages begin anew, with the loaded weights.
    """

    tensors: tuple[ShardedTensor, ...]
    namespaces: tuple[str, ...]
    line: str | None = None


def average_choice(tensors: Sequence[ShardedTensor], index: CheckpointIndex) -> AverageChoice:
    """Choose what is loaded of an optimizer's state: averages only where both have them."""
    is_wanted = any(tensor.name.startswith(AVERAGE_PREFIX) for tensor in tensors)
    is_stored = any(name.startswith(AVERAGE_PREFIX) for name in index.tensors)
    if is_wanted == is_stored:
        return AverageChoice(tuple(tensors), (OPTIMIZER_PREFIX,))
    if is_wanted:
        others = tuple(tensor for tensor in tensors if not tensor.name.startswith(AVERAGE_PREFIX))
        line = "--ema-decay: the average begins with the loaded weights, since the checkpoint holds none"
        return AverageChoice(others, (OPTIMIZER_PREFIX,), line)
    kinds = {name.split(".")[1] for name in index.tensors if name.startswith(OPTIMIZER_PREFIX)}
    namespaces = sorted(f"{OPTIMIZER_PREFIX}{kind}." for kind in kinds)
    return AverageChoice(tuple(tensors), tuple(name for name in namespaces if name != AVERAGE_PREFIX))
