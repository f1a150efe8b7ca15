"""Validate a checkpoint: its index against the files, and its tensors against the model to be loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, StoredShard, StoredTensor
from megatron.core.dist_checkpointing.planner import dtype_of
from megatron.core.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.index import StoredTensor
    from megatron.core.dist_checkpointing.planner import TensorDescription


_MOST_NAMED = 4


@dataclass(frozen=True)
class Strictness:
    """Handling of tensors that only the run or only the checkpoint has.

    ``allows_missing``: a tensor of the run that the checkpoint lacks keeps its value, and is listed.
    ``allows_unexpected``: a tensor of the checkpoint that the run lacks is skipped; ``lists_unexpected`` lists it.
    """

    allows_missing: bool = False
    allows_unexpected: bool = False
    lists_unexpected: bool = False


STRICT = Strictness()

STRICTNESS: Mapping[str, Strictness] = {
    "raise_all": STRICT,
    "raise_unexpected": Strictness(allows_unexpected=True),
    "assume_ok_unexpected": Strictness(allows_unexpected=True),
    "log_all": Strictness(allows_missing=True, allows_unexpected=True, lists_unexpected=True),
    "log_unexpected": Strictness(allows_missing=True, allows_unexpected=True),
    "return_all": Strictness(allows_missing=True, allows_unexpected=True, lists_unexpected=True),
    "return_unexpected": Strictness(allows_missing=True, allows_unexpected=True),
    "ignore_all": Strictness(allows_missing=True, allows_unexpected=True),
}
"""The values of ``--dist-ckpt-strictness``. Megatron-LM calls a tensor that the checkpoint lacks unexpected.

Every value that allows missing tensors lists them, so that no tensor silently keeps random values.
"""


@dataclass(frozen=True)
class Misfits:
    """Names of missing and unexpected tensors, and a description of each tensor with another shape or dtype."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]

    def problems(self, strictness: Strictness = STRICT) -> list[str]:
        """Return a message for each kind of tensor that is not allowed; long lists are abbreviated."""
        problems = []
        if self.missing and not strictness.allows_missing:
            problems.append(f"missing in the checkpoint: {_listed(self.missing)}")
        if self.unexpected and not strictness.allows_unexpected:
            problems.append(f"unexpected in the checkpoint: {_listed(self.unexpected)}")
        if self.different:
            problems.append(_listed(self.different))
        return problems


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + more


def find_misfits(
    wanted: Iterable[Sequence[TensorDescription]],
    stored: Mapping[str, StoredTensor],
    namespaces: Sequence[str],
    allow_cast: bool = False,
) -> Misfits:
    """Find every tensor that is missing, unexpected, or of another shape or dtype.

    ``wanted`` has all ranks' descriptions. A tensor is unexpected if no rank requests it and its name starts with one
    of ``namespaces``. With ``allow_cast`` a different dtype is accepted.
    """
    names: dict[str, TensorDescription] = {}
    for descriptions in wanted:
        for description in descriptions:
            names.setdefault(description.name, description)
    different = []
    for name in sorted(names.keys() & stored.keys()):
        have, want = stored[name], names[name]
        if have.global_shape != want.global_shape:
            different.append(
                f"{name}: shape {list(have.global_shape)} in the checkpoint, but {list(want.global_shape)} in this run"
            )
        elif have.dtype != want.dtype and not allow_cast:
            different.append(f"{name}: dtype {have.dtype} in the checkpoint, but {want.dtype} in this run")
    return Misfits(
        missing=tuple(sorted(names.keys() - stored.keys())),
        unexpected=tuple(sorted(n for n in stored.keys() - names.keys() if n.startswith(tuple(namespaces)))),
        different=tuple(different),
    )


def check_geometry(folder: Path, index: CheckpointIndex) -> None:
    """Reject boxes that exceed their tensor, overlap, do not match their number of bytes, or are outside their file.

    This also bounds the size of all reads by the size of the files. Gaps between boxes are detected when they are read.

    Raises:
        DamagedCheckpointError: there is such a box; the message names it.
    """
    try:
        _check_index(index)
    except ValueError as error:
        raise DamagedCheckpointError(f"{folder / INDEX_FILE}: not a valid checkpoint index ({error})") from error


def _check_index(index: CheckpointIndex) -> None:
    sizes = {name: file.num_bytes for name, file in index.files.items()}
    total = 0
    for tensor in index.tensors.values():
        item_bytes = _item_bytes(tensor)
        held = 0
        for shard in tensor.shards:
            _check_shard(tensor, shard, item_bytes, sizes)
            held += shard.box.num_elements
            total += shard.num_bytes
        if held > math.prod(tensor.global_shape):
            raise ValueError(f"shards of {tensor.name} overlap: {held} elements for a shape of {tensor.global_shape}")
    if total > sum(sizes.values()):
        raise ValueError(f"the shards need {total} bytes, but the files have {sum(sizes.values())} bytes")


def _item_bytes(tensor: StoredTensor) -> int:
    try:
        return dtype_of(tensor.dtype).itemsize
    except KeyError as error:
        raise ValueError(f"{tensor.name} has the dtype {tensor.dtype:.40}") from error


def _check_shard(tensor: StoredTensor, shard: StoredShard, item_bytes: int, sizes: Mapping[str, int]) -> None:
    shape, box = tensor.global_shape, shard.box
    if not len(box.offset) == len(box.shape) == len(shape):
        raise ValueError(f"a shard of {tensor.name} has {len(box.shape)} dimensions, but the tensor has {len(shape)}")
    for start, length, size in zip(box.offset, box.shape, shape):
        if start + length > size:
            raise ValueError(f"a shard of {tensor.name} at {box.offset} of shape {box.shape} is outside of {shape}")
    if box.num_elements * item_bytes != shard.num_bytes:
        raise ValueError(f"a shard of {tensor.name} with shape {box.shape} has {shard.num_bytes} bytes")
    if shard.file not in sizes or shard.start + shard.num_bytes > sizes[shard.file]:
        raise ValueError(f"a shard of {tensor.name} is at byte {shard.start} of {shard.file:.80}, beyond its end")
