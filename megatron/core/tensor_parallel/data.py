"""Broadcast of a batch from the first tensor-parallel rank, under megatron-core's name."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.collectives import broadcast, broadcast_object
from megatron.core.device import current_device
from megatron.core.process_state import resolve_group

if TYPE_CHECKING:
    from megatron.core.process_state import AnyGroup


def broadcast_data(
    keys: Sequence[Hashable],
    data: Mapping[Any, torch.Tensor] | None,
    datatype: torch.dtype,
    tp_group: AnyGroup = None,
) -> dict[Any, torch.Tensor]:
    """Return the tensors of these keys that the first rank of the group has, on every rank and on its device.

    The other ranks may pass None as ``data``.

    Raises:
        AssertionError: a tensor of the first rank does not have ``datatype``; on that rank only.
    """
    group, device = resolve_group(tp_group), current_device().torch_device
    sizes: list[torch.Size] = []
    if group.is_first:
        assert data is not None, "the first rank of the group has no data to broadcast"
        for key in keys:
            given = data[key].dtype
            assert given == datatype, f"{key} has data type {given} which is different than {datatype}"
        sizes = [data[key].shape for key in keys]
    sizes = broadcast_object(sizes, group)
    lengths = [math.prod(size) for size in sizes]
    if group.is_first and data is not None:
        flat = torch.cat([data[key].to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(lengths), dtype=datatype, device=device)
    broadcast(flat, group)
    return {key: part.view(size) for key, part, size in zip(keys, torch.split(flat, lengths), sizes, strict=True)}
