"""The flash-attn package, where it is installed and works on this machine."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable

import torch

FlashAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@functools.cache
def load_flash_attention() -> FlashAttention | None:
    """Return causal attention over flash-attn, or None where the package is not to be had.

    It takes (query, key, value, dropout) of ``[s, b, heads, d]`` in float16 or bfloat16 on CUDA.

    A package that is installed but cannot be imported (a broken shared object, a missing package that it needs) is
    named in one warning, however many layers ask.
    """
    try:
        module = importlib.import_module("flash_attn")
        flash_attn_func = module.flash_attn_func
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"
        if not is_absent:
            warnings.warn(
                f"flash-attn is installed but cannot be used, torch's attention is taken: {error}", stacklevel=2
            )
        return None

    def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        context: torch.Tensor = flash_attn_func(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), dropout_p=dropout, causal=True
        )
        return context.transpose(0, 1)

    return flash_attention
