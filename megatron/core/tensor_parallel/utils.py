"""Splits of tensors and of the vocabulary over tensor-parallel ranks, under megatron-core's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron.core.collectives import all_gather_first_dim
from megatron.core.process_state import resolve_group
from megatron.core.utils import divide

if TYPE_CHECKING:
    from megatron.core.process_state import AnyGroup


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Return equal parts of the last dim, as views or with ``contiguous_split_chunks`` contiguous.

    Raises:
        AssertionError: the dim is not divisible by the number of parts.
    """
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: torch.Tensor, new_buffer: bool = False, tp_group: AnyGroup = None
) -> torch.Tensor:
    """Return this rank's equal part of a tensor's elements, as a view or with ``new_buffer`` a copy.

    Shapes: ``[...] -> [n/tp]`` for n elements.
    """
    group = resolve_group(tp_group)
    length = tensor.numel() // group.size
    part = tensor.view(-1)[length * group.rank : length * (group.rank + 1)]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: AnyGroup = None) -> torch.Tensor:
    """Return the ranks' elements in group order.

    Shapes: ``[...] -> [n * tp]`` for n elements per rank.
    """
    return all_gather_first_dim(tensor.reshape(-1), resolve_group(tp_group))


class VocabUtility:
    """First row and end of a rank's equal part of the vocabulary."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of a rank that has ``per_partition_vocab_size`` rows."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of a rank; AssertionError if the vocabulary is not divisible by ``world_size``."""
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
