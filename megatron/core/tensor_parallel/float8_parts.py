"""Matrices in fp8 of which each rank holds a part of the rows: how the parts travel, and become the whole."""

from __future__ import annotations

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_into
from megatron.core.flight.communication import PendingWork
from megatron.core.kernels.float8.quantised import Quantised
from megatron.core.process_group import Group


class Gathering:
    """Gather the parts of a matrix along dim 0, its bytes as they are, while the host goes on."""

    def __init__(self, part: torch.Tensor, group: Group) -> None:
        part = part.contiguous()
        self._dtype = part.dtype
        part = _bytes_of(part)
        self._whole = part.new_empty((part.shape[0] * group.size, *part.shape[1:]))
        self._work: PendingWork | None = all_gather_into(self._whole, part, group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the parts one after the other along dim 0."""
        if self._work is not None:
            self._work.wait()
        return self._whole if self._whole.dtype == self._dtype else self._whole.view(self._dtype)


def gather_rows(part: Quantised, group: Group) -> Quantised:
    """Return the matrix whose rows the group's ranks hold.

    Shapes: ``[n, m] -> [group.size * n, m]``.
    """
    data = all_gather_first_dim(_bytes_of(part.data), group).view(part.data.dtype)
    scale = part.scale if part.blocks.rows == 0 else gather_scales(part.scale, group)
    return Quantised(data, scale, part.blocks)


def gather_scales(scale: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather powers of two along dim 0: their exponents travel.

    Shapes: ``[n, m] -> [group.size * n, m]``.
    """
    exponents = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    return all_gather_first_dim(exponents, group).view(torch.float8_e8m0fnu).float()


def side_by_side(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the group's matrices beside each other that lie one below the other.

    Shapes: ``[group.size * n, m] -> [n, group.size * m]``.
    """
    return torch.cat(parts.chunk(group.size), dim=1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp8 as bytes, which every backend sends; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
