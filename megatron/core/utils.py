"""Functions of megatron-core's module of this name that models and training scripts use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.process_state import GlobalMemoryBuffer as GlobalMemoryBuffer
from megatron.core.process_state import resolve_group


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless ``denominator`` divides ``numerator``."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient; AssertionError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, ``sigma``)."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, ``sigma`` / sqrt(``multiplier`` x ``num_layers``))."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma / math.sqrt(multiplier * num_layers))


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Return an attribute of a model or of the module that it wraps; with ``return_model_obj`` the module that has it.

    Raises:
        RuntimeError: ``model`` is a list.
    """
    if isinstance(model, list):
        raise RuntimeError("_get_attr_wrapped_model given a list of models")

    def is_missing(module: Any) -> bool:
        return not hasattr(module, attr) if allow_none else getattr(module, attr, None) is None

    while is_missing(model):
        if not hasattr(model, "module"):
            raise RuntimeError(f"couldn't find attribute {attr}")
        model = model.module
    return model if return_model_obj else getattr(model, attr)


def get_model_config(model: Any) -> Any:
    """Return the ``config`` of a model or of the module that it wraps."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def get_model_type(model: Any) -> Any:
    """Return the ``model_type`` of a model or of the module that it wraps."""
    return get_attr_wrapped_model(model, "model_type")


def get_model_xattn(model: Any) -> bool:
    """Return whether a model has cross-attention; False if it does not say so."""
    try:
        return bool(get_attr_wrapped_model(model, "xattn_needed"))
    except RuntimeError:
        return False


def get_tensor_model_parallel_group_if_none(
    tp_group: Any, is_expert: bool = False, check_initialized: bool = True
) -> Any:
    """Return ``tp_group``, or the process-wide tensor-parallel group (of experts) if it is None."""
    if tp_group is not None:
        return tp_group
    return resolve_group(None, "expt_tp" if is_expert else "tp").handle


def get_pg_size(group: Any = None) -> int:
    """Return a group's size; 1 without ``torch.distributed`` or a group."""
    return 1 if group is None else int(group.size())


def get_pg_rank(group: Any = None) -> int:
    """Return this rank's index in a group; 0 without ``torch.distributed`` or a group."""
    return 0 if group is None else int(group.rank())


class _Viewless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        return _without_base(inp, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _without_base(inp: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


def make_viewless_tensor(inp: torch.Tensor, requires_grad: bool, keep_graph: bool) -> torch.Tensor:
    """Return a tensor with the same memory that is no view of another; with ``keep_graph`` gradients pass through."""
    if inp._base is None:
        return inp
    if not keep_graph:
        return _without_base(inp, requires_grad)
    result: torch.Tensor = _Viewless.apply(inp, requires_grad)  # type: ignore[no-untyped-call]
    return result


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return a tensor, or a list of them; AssertionError if one is a view of another."""
    if isinstance(tensor, list):
        return [assert_viewless_tensor(each, extra_msg) for each in tensor]
    is_view = isinstance(tensor, torch.Tensor) and tensor._base is not None
    assert not is_view, f"a tensor of shape {list(tensor.shape)} is a view of another; {extra_msg or 'clone it'}"
    return tensor


def safely_set_viewless_tensor_data(tensor: torch.Tensor, new_data_tensor: torch.Tensor) -> None:
    """Replace a tensor's memory; AssertionError if the tensor is a view, whose base would keep the old memory."""
    assert_viewless_tensor(tensor, "its memory cannot be replaced")
    tensor.data = new_data_tensor


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch has at least this version; without ``check_equality`` a later one."""
    present = torch.torch_version.TorchVersion(torch.__version__.split("+")[0])
    return present >= version if check_equality else present > version
