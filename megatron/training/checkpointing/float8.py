"""The scales and histories of fp8 in a checkpoint that is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict import Float8Scaling, float8_tensors
from megatron.core.parallel_state import ParallelState


@dataclass(frozen=True, eq=False)
class Float8Choice:
    """Hold the tensors of delayed scaling that go on from a checkpoint, or the line that says why they begin anew."""

    tensors: tuple[ShardedTensor, ...]
    line: str | None


def choose_float8(index: CheckpointIndex, float8: Float8Scaling | None, state: ParallelState) -> Float8Choice:
    """Choose to go on where the checkpoint has a history of the same layers and length."""
    tensors = tuple(float8_tensors(float8, state))
    stored = [index.tensors.get(tensor.name) for tensor in tensors]
    if all(have is not None and have.global_shape == want.global_shape for have, want in zip(stored, tensors)):
        return Float8Choice(tensors, None)
    if any(have is None for have in stored):
        reason = "the checkpoint holds none"
    else:
        reason = "those of the checkpoint have another --fp8-amax-history-len"
    return Float8Choice((), f"fp8: scales and amax histories begin anew, since {reason}")
