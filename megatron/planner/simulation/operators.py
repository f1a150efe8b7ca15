"""Operations that are kernels of their own on CUDA and that a CPU build of torch takes apart, all in this one place.

They are ``rms_norm``, ``silu`` (for its gradient), ``scaled_dot_product_attention`` and its choice of a kernel. Each
becomes what a CUDA build runs: the same memory, the same kernels, no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from megatron.planner.simulation.attention_kernel import AttentionCall, choose_attention_kernel
from megatron.planner.simulation.recorder import Recorder

_aten = torch.ops.aten


_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class CudaOperators(TorchFunctionMode):
    """Give operations the kernels that they have on a CUDA device of a capability."""

    def __init__(self, recorder: Recorder, capability: tuple[int, int]) -> None:
        super().__init__()
        self._recorder = recorder
        self._capability = capability
        self._replaced: Mapping[Any, Callable[..., Any]] = {
            F.rms_norm: self._rms_norm,
            torch.rms_norm: self._rms_norm,
            F.silu: self._silu,
            F.scaled_dot_product_attention: self._attention,
            torch._fused_sdp_choice: self._choose_attention,
        }

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or what stands for it on CUDA."""
        replaced = self._replaced.get(func)
        # To ask a tensor without values for its device costs as much as an operation.
        if replaced is not None and args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            return replaced(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rms_norm(
        self, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        result: torch.Tensor = _RmsNorm.apply(x, weight, self._recorder)  # type: ignore[no-untyped-call]
        return result

    def _silu(self, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        result: torch.Tensor = _Silu.apply(x, self._recorder)  # type: ignore[no-untyped-call]
        return result

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | LowerRightMask | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        has_groups = query.shape[1] != key.shape[1]
        if isinstance(attn_mask, LowerRightMask):
            return self._lower_right_attention(query, key, value, dropout_p)
        kernel = self._kernel_of(query, key, attn_mask, dropout_p, is_causal)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        context: torch.Tensor
        if kernel == "flash":
            context = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        elif kernel == "cudnn":
            context = _aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, query.requires_grad, dropout_p, is_causal
            )[0]
        elif kernel == "efficient":
            context = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, query.requires_grad, dropout_p, is_causal
            )[0]
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(repeats, 1) if has_groups else tensor for tensor in (key, value))
            context = _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal)[0]
        return context

    def _lower_right_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float
    ) -> torch.Tensor:
        """Return the context of `torch.nn.attention.bias.CausalBias`, which never uses cuDNN's kernel."""
        context: torch.Tensor
        if query.element_size() == 2 and self._capability >= (8, 0):
            context = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, True)[0]
        else:
            context = _aten._scaled_dot_product_efficient_attention(
                query, key, value, None, query.requires_grad, dropout_p, True
            )[0]
        return context

    def _choose_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        kernel = self._kernel_of(query, key, attn_mask, dropout_p, is_causal)
        return int(_BACKENDS[kernel].value)

    def _kernel_of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> str:
        call = AttentionCall(
            dtype=str(query.dtype).removeprefix("torch."),
            head_size=query.shape[-1],
            num_queries=query.shape[-2],
            num_keys=key.shape[-2],
            is_causal=is_causal,
            has_mask=attn_mask is not None,
            has_groups=query.shape[1] != key.shape[1],
            dropout=dropout_p,
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return choose_attention_kernel(call, self._capability)


class LowerRightMask:
    """Stand for a causal mask whose last query sees all keys, as torch's CausalBias does."""

    def __init__(self, num_queries: int, num_keys: int) -> None:
        """Accept what `lower_right_mask` is called with."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch's argument parser accept the mask. `CudaOperators` handles the call before."""
        return NotImplemented


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask as torch gives it to its kernels: numbers that are added to the scores."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, recorder: Recorder) -> torch.Tensor:
        result = torch.empty_like(x)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.recorder = recorder
        ctx.save_for_backward(x, weight, scale)
        recorder.launch("_fused_rms_norm", [x], [result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        ctx.recorder.launch("_fused_rms_norm_backward", [x, grad, x, grad], [grad_x])
        return grad_x, None if weight is None else torch.empty_like(weight), None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.recorder = recorder
        ctx.save_for_backward(x)
        recorder.launch("silu", [x], [result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(grad)
        ctx.recorder.launch("silu_backward", [x, grad], [grad_x])
        return grad_x, None
