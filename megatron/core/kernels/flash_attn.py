"""The flash-attn packages, version 3 and version 2, where they are installed and work on this machine."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

_BROKEN = (ImportError, OSError, AttributeError, RuntimeError)


class FlashAttention(Protocol):
    """Attention over a flash-attn package, in float16 or bfloat16 on CUDA."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """Return the attention output; the queries are the last positions of the keys.

        With a ``window`` a query looks back at so many keys, its own among them.

        Shapes: ``query: [sq, b, n, d]``, ``key, value: [sk, b, g, d]`` ``-> [sq, b, n, d]``.
        """


@functools.cache
def load_flash_attention(*, is_deterministic: bool = False) -> FlashAttention | None:
    """Return attention over flash-attn 2, or None where the package is not to be had.

    ``is_deterministic`` asks for the same bits again: by default its backward pass adds to the gradient of the queries
    in whatever order its blocks come. Before 2.4.1 it has nothing else, and None is returned.
    A package that is installed but cannot be imported (a broken shared object, a missing package that it needs) is
    named in one warning, however many layers ask.
    """
    return _load("flash_attn", "flash-attn", takes_dropout=True, is_deterministic=is_deterministic)


@functools.cache
def load_flash_attention_3() -> FlashAttention | None:
    """Return attention over flash-attn 3, which has no dropout, or None where the package is not to be had.

    Its backward pass does not give the same bits again, asked to or not (Dao-AILab/flash-attention #2244).
    A broken package is named in one warning.
    """
    return _load("flash_attn_interface", "flash-attn 3", takes_dropout=False, is_deterministic=False)


def _load(module_name: str, package: str, *, takes_dropout: bool, is_deterministic: bool) -> FlashAttention | None:
    try:
        module: ModuleType = importlib.import_module(module_name)
        flash_attn_func: Callable[..., Any] = module.flash_attn_func
    except _BROKEN as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module_name
        if not is_absent:
            warnings.warn(
                f"{package} is installed but cannot be used, torch's attention is taken: {error}", stacklevel=3
            )
        return None
    if is_deterministic and "deterministic" not in inspect.signature(flash_attn_func).parameters:
        return None

    def flash_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"causal": is_causal}
        if takes_dropout:
            options["dropout_p"] = dropout
        if is_deterministic:
            options["deterministic"] = True
        if window is not None:
            options["window_size"] = (window - 1, 0 if is_causal else -1)
        if softcap is not None:
            options["softcap"] = softcap
        context = flash_attn_func(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), **options)
        # Early versions of flash-attn 3 return the log-sum-exps too.
        output: torch.Tensor = context[0] if isinstance(context, tuple) else context
        return output.transpose(0, 1)

    return flash_attention
