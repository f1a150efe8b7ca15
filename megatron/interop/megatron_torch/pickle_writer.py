"""Pickle a checkpoint's values as torch.save does, with the tensors' numbers left to be filled in."""

from __future__ import annotations

import argparse
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._utils

from megatron.interop.megatron_torch.stored_values import contiguous_strides

_PROTOCOL = 2  # torch's own

_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """Stand in a checkpoint's values for a tensor that has a storage of its own; ``values`` None are written later."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: torch.Tensor | None = None

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the storage."""
        return self.num_elements * self.dtype.itemsize


def given_tensor(values: torch.Tensor) -> PlannedTensor:
    """Return a tensor whose values are there already; for small ones."""
    values = values.detach().to("cpu").contiguous()
    return PlannedTensor(values.dtype, tuple(values.shape), values)


def namespace(values: Mapping[str, Any]) -> object:
    """Return values as what Megatron's ``args`` are."""
    return argparse.Namespace(**values)


def pickle_values(value: Any, key_of: Callable[[PlannedTensor], str]) -> bytes:
    """Return the pickle of a value in which `PlannedTensor` stand for tensors; ``key_of`` names their storages."""
    stream = io.BytesIO()
    _Pickler(stream, key_of).dump(value)
    return stream.getvalue()


def planned_tensors(value: Any) -> list[PlannedTensor]:
    """Return the tensors of a value, in its order."""
    if isinstance(value, PlannedTensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in planned_tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in planned_tensors(item)]
    return []


@dataclass(frozen=True)
class _Storage:
    """Name the storage of a tensor in the file."""

    tensor: PlannedTensor


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, key_of: Callable[[PlannedTensor], str]) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self._key_of = key_of

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        return ("storage", _STORAGES[tensor.dtype], self._key_of(tensor), "cpu", tensor.num_elements)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PlannedTensor):
            return NotImplemented
        no_hooks: OrderedDict[str, object] = OrderedDict()
        arguments = (_Storage(obj), 0, obj.shape, contiguous_strides(obj.shape), False, no_hooks)
        return torch._utils._rebuild_tensor_v2, arguments
