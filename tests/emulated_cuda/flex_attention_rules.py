"""FlexAttention on emulated devices: torch's eager steps, under the rules of the program that Inductor compiles."""

from __future__ import annotations

import functools
from typing import Any

import torch

_NARROWEST_HEAD = 16
_BLOCK = 16
"""What the blocks of a mask are multiples of: Inductor has no smaller tile (torch/_inductor/kernel/flex/common.py)."""


def check_flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any = None) -> None:
    """Raise what torch/_inductor/kernel/flex/flex_attention.py raises for CUDA tensors.

    Raises:
        NotImplementedError: heads are narrower than 16.
        ValueError: dtypes differ and a gradient is wanted, or blocks of the mask do not fit the program's.
        AssertionError: there is no query or no key, or the batches do not broadcast.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    # torch itself has no kernel for such heads, and raises this exception type.
    if min(width, value_width) < _NARROWEST_HEAD:
        raise NotImplementedError(
            "NYI: embedding dimension of the query, key, and value must be "
            f"at least 16 but got E={width} and Ev={value_width}"
        )
    assert query.shape[0] == key.shape[0] or key.shape[0] == 1, (
        f"Bq and Bkv must broadcastable. Got Bq={query.shape[0]} and Bkv={key.shape[0]}"
    )
    assert query.shape[2] > 0, "Query length must be greater than 0"
    assert key.shape[2] > 0, "Key length must be greater than 0"
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if wants_gradient and not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "Backward pass with mixed query, key, and value dtype is not supported, "
            f"got query.dtype={query.dtype}, key.dtype={key.dtype}, and value.dtype={value.dtype}"
        )
    if block_mask is not None and any(size % _BLOCK for size in block_mask.BLOCK_SIZE):
        queries, keys = block_mask.BLOCK_SIZE
        raise ValueError(
            "Q and KV block size must be divisible by BLOCK_M and BLOCK_N. We "
            f"got Q_BLOCK_SIZE={queries} and KV_BLOCK_SIZE={keys}."
        )


def run_flex_attention_eagerly() -> None:
    """Let FlexAttention compute its steps as they are written, once its rules are checked."""
    from torch.nn.attention import flex_attention as module

    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    compute = module.flex_attention

    @functools.wraps(compute)
    def checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        if query.is_cuda:
            block_mask = options.get("block_mask", args[1] if len(args) > 1 else None)
            check_flex_attention(query, key, value, block_mask)
        return compute(query, key, value, *args, **options)

    module.flex_attention = checked
