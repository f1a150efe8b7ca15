"""Functions of megatron-core's module of this name that models and training scripts use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

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


class GlobalMemoryBuffer:
    """Tensors by name and dtype whose memory is reused and grows to the largest request."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: tuple[int, ...], dtype: torch.dtype, name: str, mem_alloc_context: Any = None
    ) -> torch.Tensor:
        """Return uninitialized memory of a shape; its contents are lost at the next call with the same name."""
        length = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            device = "cuda" if torch.get_default_device().type == "cuda" else "cpu"
            held = self.buffer[(name, dtype)] = torch.empty(length, dtype=dtype, device=device)
        return held[:length].view(*tensor_shape)


def make_viewless_tensor(inp: torch.Tensor, requires_grad: bool, keep_graph: bool) -> torch.Tensor:
    """Return the tensor; views need no copy here, because pipeline sends do not free outputs by their base."""
    return inp


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch has at least this version; without ``check_equality`` a later one."""
    present = torch.torch_version.TorchVersion(torch.__version__.split("+")[0])
    return present >= version if check_equality else present > version
