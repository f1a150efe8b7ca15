"""Compare the tensors of two sources value by value, in the memory of two small boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.mapping import dtype_name
from megatron.core.sharding import split_box
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo

MAX_BOX_BYTES = 64 * 1024 * 1024
_CHUNK_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorComparison:
    """Hold how a tensor of two checkpoints differs. None stands for a tensor that one of them lacks.

    ``max_difference`` is the largest absolute difference of two elements, ``max_value`` the largest absolute value in
    the second checkpoint. ``num_different`` counts elements whose bits differ.
    """

    name: str
    left: TensorInfo | None
    right: TensorInfo | None
    num_different: int = 0
    max_difference: float = 0.0
    max_value: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Return whether both have the tensor, in one shape and dtype, with the same bits."""
        return self.left == self.right and self.num_different == 0

    @property
    def relative_difference(self) -> float:
        """Return the largest difference over the largest value of the second checkpoint's tensor."""
        if self.max_difference == 0:
            return 0.0
        return self.max_difference / self.max_value if self.max_value else math.inf

    def is_close(self, tolerance: float) -> bool:
        """Return whether the tensors differ by no more than a tolerance relative to the largest value."""
        return self.is_equal or (self.left == self.right and self.relative_difference <= tolerance)

    def __str__(self) -> str:
        """Return the difference in one line."""
        if self.left is None or self.right is None:
            return f"{self.name}: only in the {'second' if self.left is None else 'first'}"
        parts = []
        if self.left.global_shape != self.right.global_shape:
            return f"{self.name}: shape {list(self.left.global_shape)} and {list(self.right.global_shape)}"
        if self.left.dtype != self.right.dtype:
            parts.append(f"dtype {dtype_name(self.left.dtype)} and {dtype_name(self.right.dtype)}")
        if self.num_different:
            parts.append(
                f"{self.num_different} of {self.left.num_elements} elements differ, by at most "
                f"{self.max_difference:.3e} (relative {self.relative_difference:.3e})"
            )
        return f"{self.name}: {'; '.join(parts) or 'equal'}"


def compare_sources(left: CheckpointSource, right: CheckpointSource) -> Iterator[TensorComparison]:
    """Compare every tensor that either source has, in the order of their names.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name in sorted({*left.tensors, *right.tensors}):
        infos = left.tensors.get(name), right.tensors.get(name)
        if infos[0] is None or infos[1] is None or infos[0].global_shape != infos[1].global_shape:
            yield TensorComparison(name, *infos)
        else:
            yield _compare_tensor(name, left, right)


def _compare_tensor(name: str, left: CheckpointSource, right: CheckpointSource) -> TensorComparison:
    ours, theirs = left.tensors[name], right.tensors[name]
    itemsize = max(ours.dtype.itemsize, theirs.dtype.itemsize)
    boxes = [box for box in split_box(ours.whole, itemsize, MAX_BOX_BYTES) if box.num_elements]
    if ours.dtype == theirs.dtype and all(
        torch.equal(_bits(left.read(name, box)), _bits(right.read(name, box))) for box in boxes
    ):
        return TensorComparison(name, ours, theirs)
    num_different, max_difference, max_value = 0, 0.0, 0.0
    for box in boxes:
        a, b = left.read(name, box).reshape(-1), right.read(name, box).reshape(-1)
        for start in range(0, a.numel(), _CHUNK_ELEMENTS):
            chunk = slice(start, start + _CHUNK_ELEMENTS)
            count, difference, value = _measure(a[chunk], b[chunk])
            num_different += count
            max_difference = max(max_difference, difference)
            max_value = max(max_value, value)
    return TensorComparison(name, ours, theirs, num_different, max_difference, max_value)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers: a NaN must equal itself, and the two zeros differ."""
    return values.reshape(-1).view(_INTEGERS[values.dtype.itemsize])


def _measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """Return how many elements differ, by how much at most, and the largest value of ``b``."""
    wide_a, wide_b = a.double(), b.double()
    if a.dtype == b.dtype:
        num_different = int((_bits(a) != _bits(b)).sum())
    else:
        num_different = int((wide_a != wide_b).sum())
    # Two equal infinities, or NaNs, differ by nothing; one NaN beside a number by infinity.
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    difference = (wide_a - wide_b).abs().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf)
    value = wide_b.abs().nan_to_num_(nan=0.0)
    return num_different, float(difference.max()), float(value.max())
