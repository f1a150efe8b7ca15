"""Write a run's part of a checkpoint of Megatron's ``torch_dist`` format, at the layout of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.async_save import StagingArea
from megatron.core.dist_checkpointing.disk import write_error
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.parallel_state import ParallelState
from megatron.interop.megatron_torch.experts.held_apart import is_held_apart, prefixes_held_apart
from megatron.interop.torch_dist.chunk_file import ChunkFile, ChunkPlace, WrittenEntry
from megatron.interop.torch_dist.folder_files import METADATA_FILE
from megatron.interop.torch_dist.metadata_writer import write_shared_files
from megatron.interop.torch_dist.torch_dist_plan import TorchDistPlan
from megatron.interop.torch_dist.torch_dist_writer import data_file_name
from megatron.training.checkpointing.torch_format import stored_random_states


@dataclass(frozen=True, eq=False)
class ChunkWrite:
    """Say that values go to one or more places of the checkpoint."""

    places: tuple[ChunkPlace, ...]
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class TorchDistShare:
    """Hold what this rank writes, into a file of its own; the first rank then completes the folder."""

    folder: Path
    rank: int
    writes: tuple[ChunkWrite, ...]
    objects: tuple[tuple[str, Any], ...]
    common: Mapping[str, Any]

    def staged(self, area: StagingArea) -> TorchDistShare:
        """Return the same share with a copy of its values, which training no longer changes."""
        ordered = sorted(self.writes, key=lambda write: -write.values.element_size())
        copies = area.copy([write.values for write in ordered])
        writes = (replace(write, values=copy) for write, copy in zip(ordered, copies, strict=True))
        return replace(self, writes=tuple(writes))

    def write(self) -> list[WrittenEntry]:
        """Write this rank's file, if it holds anything, and return what is in it.

        Raises:
            CheckpointWriteError: the file system refused.
        """
        if not self.writes and not self.objects:
            return []
        path = self.folder / data_file_name(self.rank, 0)
        needed = sum(write.values.nbytes * len(write.places) for write in self.writes)
        try:
            with ChunkFile(path) as file:
                for key, value in self.objects:
                    file.append_object(key, value)
                for write in self.writes:
                    for place in write.places:
                        file.append_chunk(place, write.values)
        except OSError as failure:
            raise write_error(path, failure, needed) from failure
        return file.written

    def complete(self, written: Sequence[WrittenEntry]) -> None:
        """Write the files that say what all ranks wrote; for one rank.

        Raises:
            CheckpointError: the ranks together do not hold everything.
            CheckpointWriteError: the file system refused.
        """
        try:
            write_shared_files(self.folder, self.common, written)
        except OSError as failure:
            raise write_error(self.folder / METADATA_FILE, failure) from failure


def plan_torch_dist_share(
    folder: Path,
    content: Mapping[str, Any],
    tensors: Sequence[ShardedTensor],
    rng: Mapping[str, torch.Tensor],
    state: ParallelState,
) -> TorchDistShare:
    """Return this rank's share; collective. ``content`` and ``rng`` are as for `plan_torch_share`.

    A copy of the model writes its weights once, in its first data- and context-parallel rank; of a sharded optimizer,
    and of sharded weights, every rank writes what it alone holds.
    """
    plan = TorchDistPlan(content)
    ddp, is_first = content["config"]["ddp"], state.dp_cp.is_first
    ours = []
    for group, are_experts in ((state.dp_cp, False), (state.expert_dp, True)):
        held_apart = prefixes_held_apart(ddp, group)
        own = [tensor for tensor in tensors if tensor.is_owner and tensor.is_expert == are_experts]
        ours += [tensor for tensor in own if group.is_first or is_held_apart(tensor.name, held_apart)]
    random_states = stored_random_states(content, rng, state)
    objects: list[tuple[str, Any]] = []
    if is_first and state.tp.is_first:
        objects += (item for layer in sorted(_layers_of(ours)) for item in plan.layer_objects(layer))
    if is_first and random_states is not None:
        objects.append((plan.random_state_key(state.tp.rank, state.pp.rank), random_states))
    common = plan.shared_value(has_random_states=random_states is not None)
    return TorchDistShare(folder, state.rank, tuple(_writes(plan, ours)), tuple(objects), common)


def _writes(plan: TorchDistPlan, tensors: Sequence[ShardedTensor]) -> Iterator[ChunkWrite]:
    for tensor in tensors:
        for piece in tensor.pieces:
            box = piece.global_box
            places = plan.places(tensor.name, tensor.global_shape, box)
            yield ChunkWrite(tuple(places), tensor.data[piece.local_box.slices])
            for place in plan.padding(tensor.name, tensor.global_shape, box):
                yield ChunkWrite((place,), torch.zeros(place.box.shape, dtype=tensor.data.dtype))


def _layers_of(tensors: Sequence[ShardedTensor]) -> set[int]:
    names = [tensor.name.split(".") for tensor in tensors]
    return {int(words[3]) for words in names if words[:3] == ["model", "decoder", "layers"]}
