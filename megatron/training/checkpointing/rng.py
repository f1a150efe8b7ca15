"""Which random number streams of a checkpoint go on in a run, at any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor, dtype_name, whole_tensor
from megatron.core.dist_checkpointing.state_dict import rng_name
from megatron.core.parallel_sizes import GRID_AXES, SIZE_NAMES
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.random import STREAM_AXES


@dataclass(frozen=True, eq=False)
class StreamChoice:
    """Hold room for the streams that go on, what fills it, and a line about those that do not; None where all do."""

    streams: Mapping[str, torch.Tensor]
    tensors: tuple[ShardedTensor, ...]
    line: str | None


def choose_streams(
    index: CheckpointIndex, own: Mapping[str, torch.Tensor], state: ParallelState, iteration: int
) -> StreamChoice:
    """Choose the streams of ``own`` that the checkpoint can continue.

    A stream goes on where the grid has kept its size along every axis along which the stream differs: dropout that is
    equal on all tensor-parallel ranks goes on at another tensor-parallel size. A run on another kind of device, or of
    a checkpoint that holds no streams, continues none.
    """
    old, new = index.common["layout"], state.sizes.record()
    changed = {axis for axis, size in SIZE_NAMES.items() if old.get(size) != new[size]}
    place = {axis: 0 if axis in changed else at for axis, at in state.place.items()}
    streams, tensors = {}, []
    for stream, values in own.items():
        stored = index.tensors.get(rng_name(stream, place))
        is_like = stored is not None and (stored.global_shape, stored.dtype) == (
            tuple(values.shape),
            dtype_name(values.dtype),
        )
        if is_like and changed.isdisjoint(STREAM_AXES.get(stream, GRID_AXES)):
            streams[stream] = torch.empty_like(values)
            tensors.append(whole_tensor(rng_name(stream, place), streams[stream]))
    begun = [stream for stream in own if stream not in streams]
    if not begun:
        return StreamChoice(streams, tuple(tensors), None)
    names = [SIZE_NAMES[axis] for axis in GRID_AXES if axis in changed]
    reasons = [f"{name} {old.get(name)} -> {new[name]}" for name in names]
    return StreamChoice(
        streams,
        tuple(tensors),
        f"random number streams: {', '.join(begun)} start anew, from the seed and iteration {iteration}"
        f" ({', '.join(reasons) or 'the checkpoint holds none of this device'})"
        + (f"; {', '.join(streams)} go on" if streams else ""),
    )
