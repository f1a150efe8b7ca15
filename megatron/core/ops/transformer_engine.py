"""NVIDIA's transformer-engine for ``--transformer-impl transformer_engine``: attention, and norms on our weights."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from megatron.core.ops.dot_product_attention import AttentionInputs, drawing_as

TRANSFORMER_ENGINE = "transformer_engine"
"""Value of ``--transformer-impl`` that selects transformer-engine."""

_DEVICE = "cuda"
_HALF = (torch.float16, torch.bfloat16)
_BROKEN = (ImportError, OSError, AttributeError, RuntimeError, AssertionError)


class TransformerEngine:
    """Attention and norms by transformer-engine's modules, whose own parameters are unused."""

    def __init__(
        self, attention: Callable[..., nn.Module], layer_norm: Callable[..., nn.Module], rms_norm: type[nn.Module]
    ) -> None:
        self._norms: dict[str, Callable[..., nn.Module]] = {"LayerNorm": layer_norm, "RMSNorm": rms_norm}
        self._attention = functools.cache(functools.partial(attention, qkv_format="sbhd"))

    def attend(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the attention output for equally many queries and keys, in float16 or bfloat16."""
        assert inputs.sinks is None, "the module is made without sinks"
        (_, _, num_heads, head_dim), pattern = inputs.query.shape, inputs.pattern
        assert pattern.window is None or pattern.is_causal, "its windows in both directions are other ones"
        module = self._attention(
            *(num_heads, head_dim),
            num_gqa_groups=inputs.key.shape[2],
            attention_dropout=inputs.dropout_probability,
        )
        with drawing_as(inputs.dropout, inputs.query.device):
            context: torch.Tensor = module(
                *inputs.heads,
                attn_mask_type="causal" if pattern.is_causal else "no_mask",
                window_size=None if pattern.window is None else (pattern.window - 1, 0),
            )
        # The heads are returned as one flattened dim.
        return context.view(inputs.query.shape)

    def make_norm(self, kind: str, width: int, epsilon: float, *, centered_weight: bool) -> EngineNorm | None:
        """Return a function that normalizes the last dim, or None if transformer-engine has no such norm."""
        if kind not in self._norms:
            return None
        return EngineNorm(self._norms[kind](width, eps=epsilon, zero_centered_gamma=centered_weight, device="meta"))


class EngineNorm:
    """Norm by a transformer-engine module with given weights; the module's own weights are on the meta device."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether both have the same 16-bit dtype, because the result would have the dtype of the weight."""
        return x.dtype == weight.dtype and x.dtype in _HALF

    def __call__(self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> torch.Tensor:
        """Return the normalized input.

        Shapes: ``[..., n] -> [..., n]``.
        """
        # The module reads its weights in the backward pass too, so they stay assigned.
        self._module.weight = weight
        if bias is not None:
            self._module.bias = bias
        # Its kernels require contiguous rows, but heads are slices of longer rows.
        return cast("torch.Tensor", self._module(x.contiguous()))


@functools.cache
def load_transformer_engine() -> TransformerEngine | None:
    """Return transformer-engine, or None if the package is unavailable.

    An installed package that cannot be imported (a broken shared object, missing parts) causes one warning.
    """
    try:
        module = importlib.import_module("transformer_engine.pytorch")
        return TransformerEngine(module.DotProductAttention, module.LayerNorm, module.RMSNorm)
    except _BROKEN as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine"
        if not is_absent:
            warnings.warn(
                f"transformer-engine is installed but cannot be used, so this project's own layers are used: {error}",
                stacklevel=2,
            )
        return None


def transformer_engine_for(transformer_impl: str, device: torch.device | str) -> TransformerEngine | None:
    """Return transformer-engine if it is selected and works on this device, else None."""
    if transformer_impl != TRANSFORMER_ENGINE or torch.device(device).type != _DEVICE:
        return None
    return load_transformer_engine()


def why_no_transformer_engine(params_dtype: str, device: torch.device | str) -> str | None:
    """Return the reason why transformer-engine cannot run a model of this precision on this device, or None."""
    if torch.device(device).type != _DEVICE:
        return "it needs CUDA"
    if params_dtype not in ("float16", "bfloat16"):
        return "it needs --bf16 or --fp16"
    return "the package cannot be imported" if load_transformer_engine() is None else None
