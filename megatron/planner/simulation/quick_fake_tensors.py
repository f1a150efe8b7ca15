"""Run operators on fake tensors with less of torch's bookkeeping: sizes here are plain numbers, never symbols."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.select.int, _aten.slice.Tensor)
"""`FakeTensorMode` has rules of its own for these, which matter for symbolic sizes only."""
_FACTORIES = (
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten.new_zeros.default),
    *(_aten.empty_like.default, _aten.zeros_like.default),
)
_EMPTY: Mapping[str, Any] = {}


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Give the results of `FakeTensorMode`, in a third of its time for most operators.

    An operator whose tensors are on one device goes to its meta kernel at once. `FakeTensorMode` runs all others:
    those that have a rule of their own in it, that take tensors of two devices, or that make constants.
    """

    _layouts: ClassVar[dict[Any, tuple[Any, Any, torch.dtype]]] = {}
    """Shape, strides and dtype of the results of calls so far: many meta kernels are slow Python."""

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _EMPTY
    ) -> object:
        """Run an operator without values."""
        if func in _FACTORIES:
            given = kwargs.get("device")
            device = _common_device(args[:1]) if given is None else _indexed(torch.device(given))
            if device is not None and device.type == "cuda" and not kwargs.get("pin_memory"):
                with in_kernel_invocation_manager(self):
                    return self._wrap(func(*args, **{**kwargs, "device": "meta"}), device)
        elif _has_plain_meta_kernel(func) and "device" not in kwargs:
            device = _common_device((*args, *kwargs.values()))
            if device is not None:
                key = (func, _described(args), _described([*kwargs.items()])) if _makes_one_tensor(func) else None
                with in_kernel_invocation_manager(self):
                    if key is not None and key in self._layouts:
                        shape, strides, dtype = self._layouts[key]
                        result = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                    else:
                        result = func(*args, **kwargs)
                if key is not None:
                    self._layouts[key] = (result.shape, result.stride(), result.dtype)
                return self._wrap(result, device)
        return super().dispatch(func, types, args, kwargs)

    def _wrap(self, result: Any, device: torch.device) -> Any:
        if isinstance(result, torch.Tensor):
            return result if isinstance(result, FakeTensor) else FakeTensor(self, result, device)
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrap(each, device) for each in result)
        return result


def _common_device(values: Iterable[Any]) -> torch.device | None:
    """Return the device of all tensors; None where there is no tensor, one with values, or two devices."""
    device = None
    for tensor in _tensors(values):
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        if device is not None and tensor.fake_device != device:
            return None
        device = tensor.fake_device
    return device


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def _described(argument: Any) -> Any:
    """Return what a result's layout may depend on: a number counts with its type, since 1 equals 1.0."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_described, argument))
    return type(argument), argument


@functools.cache
def _makes_one_tensor(func: Any) -> bool:
    """Return whether an operator's one result is a new tensor."""
    results = func._schema.returns
    is_tensor = len(results) == 1 and str(results[0].type) == "Tensor"
    return is_tensor and not any(each.alias_info for each in (*func._schema.arguments, *results))


@functools.cache
def _has_plain_meta_kernel(func: Any) -> bool:
    """Return whether `FakeTensorMode` has no rule for an operator but to run the kernel of meta tensors."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    name = func._name
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta"):
        return False
    return func in _VIEWS or not any(applies(func) for applies, _ in op_implementations_checks)
