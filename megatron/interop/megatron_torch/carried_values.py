"""What a checkpoint that came from Megatron's files hands on to new ones of the same layout, beyond what ours need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.interop.megatron_torch.key_names import has_fused_norms
from megatron.interop.megatron_torch.megatron_arguments import plain_arguments
from megatron.interop.megatron_torch.pickle_writer import given_tensor
from megatron.interop.megatron_torch.rank_files import RankFile, is_megatron_torch, open_rank_files
from megatron.interop.megatron_torch.rank_planner import RankExtras
from megatron.interop.megatron_torch.stage_parameters import WORD_EMBEDDING
from megatron.interop.megatron_torch.stored_values import LazyTensor, Record, StoredArray
from megatron.interop.megatron_torch.torch_file import TorchFile


@dataclass(frozen=True, kw_only=True)
class CarriedValues:
    """Hold a checkpoint's layout as its files have it, and each rank's own values, by (tensor rank, pipeline rank).

    Nothing is carried where the checkpoint was in another format.
    """

    num_chunks: int = 0
    padded_vocab_size: int = 0
    fused_norms: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[tuple[int, int], RankExtras] = field(default_factory=dict)

    def fits(self, tp: int, pp: int, num_chunks: int) -> bool:
        """Return whether a layout is the one that the files have."""
        grid = {(t, p) for t in range(tp) for p in range(pp)}
        return self.ranks.keys() == grid and self.num_chunks == num_chunks


def carried_from(folder: Path) -> CarriedValues:
    """Return what the files of a folder hand on; nothing where it is in another format."""
    if not is_megatron_torch(folder):
        return CarriedValues()
    ranks = open_rank_files(folder)
    try:
        return carried_from_ranks(ranks)
    finally:
        for rank in ranks.values():
            rank.close()


def carried_from_ranks(ranks: Mapping[tuple[int, int], RankFile]) -> CarriedValues:
    """Return what open files hand on."""
    first = ranks[0, 0]
    state = first.file.value
    tp = 1 + max(tp_rank for tp_rank, _ in ranks)
    return CarriedValues(
        num_chunks=len(first.chunks),
        padded_vocab_size=first.chunks[0][WORD_EMBEDDING].shape[0] * tp,
        fused_norms=has_fused_norms(state.get("model", state.get("model0", {}))),
        arguments=plain_arguments(first.arguments),
        ranks={
            place: RankExtras(
                arguments=plain_arguments(rank.arguments),
                rng_state=as_values(rank.file.value.get("rng_state"), rank.file),
            )
            for place, rank in ranks.items()
        },
    )


def as_values(value: Any, file: TorchFile) -> Any:
    """Return a small value of a file with its tensors and arrays read; objects of no use become None."""
    if isinstance(value, LazyTensor):
        return given_tensor(file.view(value).clone())
    if isinstance(value, StoredArray):
        return np.frombuffer(value.data, np.dtype(value.dtype)).reshape(value.shape).copy()
    if isinstance(value, Mapping):
        return {key: as_values(item, file) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_values(item, file) for item in value)
    return None if isinstance(value, Record) else value
