"""Load a checkpoint of Megatron's own format into a run of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor, StoredTensor, dtype_name
from megatron.core.dist_checkpointing.serialization import LoadedTensors, raise_on_all_ranks
from megatron.core.dist_checkpointing.state_dict import rng_name
from megatron.core.dist_checkpointing.validation import STRICT, Strictness, find_misfits
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.random import DEFAULT, REPLICATED, TENSOR_PARALLEL
from megatron.interop.megatron_torch.megatron_torch_source import MegatronTorchSource
from megatron.interop.megatron_torch.stored_values import LazyTensor

STREAM_PLACES: Mapping[str, tuple[str, ...]] = {
    DEFAULT: ("cuda_rng_state",),
    REPLICATED: ("rng_tracker_states", "data-parallel-rng"),
    TENSOR_PARALLEL: ("rng_tracker_states", "model-parallel-rng"),
}
"""Where a stream of random numbers stands in an entry of ``rng_state``."""
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class TorchCheckpoint:
    """Offer the open files of a checkpoint; each rank reads the boxes that it holds, from any rank's file."""

    source: MegatronTorchSource
    index: CheckpointIndex
    streams: Mapping[str, torch.Tensor]
    state: ParallelState

    @property
    def config(self) -> Mapping[str, Any]:
        """Return what ``args`` record of the configuration."""
        return self.source.config

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place.

        Raises:
            CheckpointError: names, shapes or dtypes do not fit; all of them are listed. On every rank alike.
        """
        world = self.state.world
        descriptions = all_gather_objects([tensor.describe() for tensor in tensors], world)
        misfits = find_misfits(descriptions, self.index.tensors, namespaces, allow_cast)
        problems = misfits.problems(strictness)
        if problems:
            raise CheckpointError(
                f"checkpoint {self.source.folder} does not fit this run:" + "".join(f"\n  {p}" for p in problems)
            )
        present = [tensor for tensor in tensors if tensor.name in self.index.tensors]
        bytes_read = _on_all_ranks(lambda: sum(self._fill(tensor) for tensor in present), self.state)
        return LoadedTensors(bytes_read, misfits.missing, misfits.unexpected)

    def _fill(self, tensor: ShardedTensor) -> int:
        """Fill one tensor and return the bytes of what was read."""
        if tensor.name in self.streams:
            tensor.data.copy_(self.streams[tensor.name])
            return tensor.data.nbytes
        num_bytes = 0
        with torch.no_grad():
            for piece in tensor.pieces:
                values = self.source.read(tensor.name, piece.global_box)
                tensor.data[piece.local_box.slices].copy_(values)
                num_bytes += values.nbytes
        return num_bytes


def open_torch_checkpoint(folder: Path, state: ParallelState, verify: bool, vocab_size: int | None) -> TorchCheckpoint:
    """Open a folder's files on every rank; with ``verify`` the ranks share out the comparison of checksums.

    Raises:
        CheckpointError: a file is damaged, asks for what is not data, or is of another model. On every rank alike.
    """

    def open_files() -> MegatronTorchSource:
        source = MegatronTorchSource(folder, vocab_size)
        try:
            if verify:
                source.check_storages(state.world.rank, state.world.size)
        except CheckpointError:
            source.close()
            raise
        return source

    source = _on_all_ranks(open_files, state)
    tensors = {
        name: StoredTensor(name, info.global_shape, dtype_name(info.dtype), ()) for name, info in source.tensors.items()
    }
    streams = _streams(source)
    for name, values in streams.items():
        tensors[name] = StoredTensor(name, tuple(values.shape), dtype_name(values.dtype), ())
    return TorchCheckpoint(source, CheckpointIndex(tensors, {}, source.common), streams, state)


def _streams(source: MegatronTorchSource) -> dict[str, torch.Tensor]:
    """Return the streams of random numbers in the files, by native name: those of every data-parallel rank, or none.

    Megatron usually stores one state for all data-parallel ranks; here they differ, and then all are stored.
    """
    found = {}
    layout = source.common["layout"]
    cp, dp = layout["context_parallel_size"], layout["data_parallel_size"]
    for (tp_rank, pp_rank), rank in source.ranks.items():
        states = rank.file.value.get("rng_state")
        if not isinstance(states, list) or len(states) != dp * cp:
            continue
        for number, entry in enumerate(states):
            for stream, keys in STREAM_PLACES.items():
                value = entry
                for key in keys:
                    value = value.get(key) if isinstance(value, Mapping) else None
                if isinstance(value, LazyTensor):
                    place = {"pp": pp_rank, "dp": number // cp, "cp": number % cp, "tp": tp_rank}
                    found[rng_name(stream, place)] = rank.file.view(value)
    return found


def _on_all_ranks(action: Callable[[], Result], state: ParallelState) -> Result:
    """Return what the action returns; raise on every rank what it raised on one."""
    result: list[Result] = []
    error: MegatronError | None = None
    try:
        result.append(action())
    except MegatronError as failure:
        error = failure
    raise_on_all_ranks(error, state.world)
    return result[0]
