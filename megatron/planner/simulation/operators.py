"""Operators that a CPU build of torch decomposes, but that have kernels of their own on CUDA.

They are ``rms_norm``, ``silu`` (for its gradient), ``scaled_dot_product_attention`` with its choice of a kernel, and
FlexAttention. Each is replaced by the kernels of a CUDA build: the same memory, no values.

The rules that choose an attention kernel are those of torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for
torch 2.13 with cuDNN 9.15.1 or newer, in training, with four-dimensional tensors. A CPU build has no such choice.

cuDNN's operator accepts any dropout probability, but some of its kernels round it to sixteenths. So torch uses cuDNN
for multiples of 1/16 only (``check_cudnn_dropout``, pytorch/pytorch #174245 of February 2026). cuDNN's kernel is not
deterministic either (``check_cudnn_deterministic``).

FlexAttention runs the kernels to which torch compiles it, with the work of its visible blocks. The forward pass is one
kernel, the backward pass two: the row sums of output times gradient, and the three gradients. The number of visible
blocks depends on the mask's values, which fake tensors do not have. So each mask is built a second time on the host,
with documents of the lengths in the empty samples, and its blocks are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from megatron.core.ops import AttentionPattern, attention_backend, flex_attention
from megatron.planner.simulation.recorder import Recorder

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


_MAX_FLASH_HEAD = 256
_MAX_CUDNN_HEAD = 128
_CUDNN_DROPOUT_STEPS = 16
_PREFERS_CUDNN = (9, 10)
"""Major compute capabilities for which torch prefers cuDNN; for all others it does not use cuDNN."""
_NO_WIDE_FLASH = ((8, 6), (8, 9), (12, 0), (12, 1))


@dataclass(frozen=True)
class AttentionCall:
    """Properties of an attention call on which the choice of a kernel depends.

    ``has_mask`` means an explicit mask or bias. ``has_groups`` means fewer key heads than query heads.
    ``is_deterministic`` means that torch is set to use deterministic algorithms.
    """

    dtype: str
    head_size: int
    num_queries: int
    num_keys: int
    is_causal: bool = False
    has_mask: bool = False
    has_groups: bool = False
    dropout: float = 0.0
    is_deterministic: bool = False

    @property
    def is_half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")


def choose_attention_kernel(call: AttentionCall, capability: tuple[int, int]) -> str:
    """Return the first of ``cudnn``, ``flash``, ``efficient`` and ``math`` that supports the call."""
    if capability[0] in _PREFERS_CUDNN and _fits_cudnn(call):
        return "cudnn"
    if _fits_flash(call, capability):
        return "flash"
    if _fits_efficient(call, capability):
        return "efficient"
    return "math"


def _fits_cudnn(call: AttentionCall) -> bool:
    steps = call.dropout * _CUDNN_DROPOUT_STEPS
    fits_head = call.head_size <= _MAX_CUDNN_HEAD and call.head_size % 8 == 0
    fits_length = call.num_keys != 1 and not (call.dropout and call.num_queries == 1)
    return call.is_half and fits_head and fits_length and steps == int(steps) and not call.is_deterministic


def _fits_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    if capability < (8, 0) or not call.is_half or call.has_mask or call.head_size > _MAX_FLASH_HEAD:
        return False
    if call.is_causal and call.num_queries != call.num_keys:
        return False
    if capability in _NO_WIDE_FLASH:
        return call.head_size <= 192 or (call.head_size > 224 and not call.dropout)
    return True


def _fits_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    if call.has_groups or call.dtype not in ("float16", "bfloat16", "float32"):
        return False
    if call.dtype == "bfloat16" and capability < (8, 0):
        return False
    alignment = 8 if call.is_half else 4
    return call.head_size % alignment == 0


_aten = torch.ops.aten


_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class CudaOperators(TorchFunctionMode):
    """Give operations the kernels that they have on a CUDA device with a compute capability."""

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
        """Run an operation, or its replacement on CUDA."""
        replaced = self._replaced.get(func)
        # Reading the device of a fake tensor takes as long as an operation.
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
        """Return the attention output with `torch.nn.attention.bias.CausalBias`, which never uses cuDNN's kernel."""
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
    """Causal mask whose last query attends to all keys, like torch's CausalBias."""

    def __init__(self, num_queries: int, num_keys: int) -> None:
        """Accept the arguments of `lower_right_mask`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch's argument parser accept the mask. `CudaOperators` handles the call first."""
        return NotImplemented


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask as torch passes it to its kernels: as numbers that are added to the scores."""
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


class FakeFlexAttention:
    """Replacement for the compiled FlexAttention.

    ``second_document`` is the position at which the second document of a sample begins, counted from a call's first
    key.
    """

    def __init__(self, recorder: Recorder, second_document: int) -> None:
        self._recorder = recorder
        self._second_document = second_document
        self._pairs = WeakKeyDictionary[Any, int]()

    @contextmanager
    def taking_calls(self) -> Iterator[None]:
        """Replace FlexAttention within the context."""
        make = flex_attention.make_block_mask

        def make_and_count(
            pattern: AttentionPattern, num_queries: int, num_keys: int, device: torch.device, block_size: int
        ) -> BlockMask:
            mask = make(pattern, num_queries, num_keys, device, block_size)
            self._pairs[mask] = self._visible_pairs(make, pattern, num_queries, num_keys, block_size)
            return mask

        with (
            patch.object(flex_attention, "make_block_mask", make_and_count),
            patch.object(attention_backend, "load_flex_attention", lambda: self),
        ):
            yield

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Callable[..., torch.Tensor] | None,
        block_mask: BlockMask,
        enable_gqa: bool,
        return_aux: AuxRequest | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, AuxOutput]:
        """Return the output, with the log-sum-exps if ``return_aux`` is given, and record the kernels.

        Shapes: as in torch's FlexAttention.
        """
        flops = 4.0 * self._pairs[block_mask] * query.shape[0] * query.shape[1] * query.shape[3]
        lists = [tensor for tensor in block_mask.as_tuple() if isinstance(tensor, torch.Tensor)]
        output: torch.Tensor
        output, logsumexp = _FlexAttention.apply(query, key, value, lists, flops, self._recorder)  # type: ignore[no-untyped-call]
        if return_aux is None:
            return output
        from torch.nn.attention.flex_attention import AuxOutput

        return output, AuxOutput(lse=logsumexp)

    def _visible_pairs(
        self,
        make: Callable[..., BlockMask],
        pattern: AttentionPattern,
        num_queries: int,
        num_keys: int,
        block_size: int,
    ) -> int:
        """Return the number of query-key pairs in the blocks that are computed in full or in part."""
        with unset_fake_temporarily():
            ids = None
            if pattern.document_ids is not None:
                ids = (torch.arange(num_keys) >= self._second_document).long()[None]
            host = torch.device("cpu")
            mask = make(replace(pattern, document_ids=ids), num_queries, num_keys, host, block_size)
            blocks = mask.kv_num_blocks.sum()
            if mask.full_kv_num_blocks is not None:
                blocks = blocks + mask.full_kv_num_blocks.sum()
            return int(blocks) * block_size**2


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: list[torch.Tensor],
        flops: float,
        recorder: Recorder,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.empty_like(query)
        row_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        recorder.launch("_flex_attention", [query, key, value, *lists], [output, row_sums], flops)
        ctx.save_for_backward(query, key, value, output, row_sums)
        ctx.lists, ctx.flops, ctx.recorder = lists, flops, recorder
        return output, row_sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, row_sums = ctx.saved_tensors
        recorder: Recorder = ctx.recorder
        products = torch.empty_like(row_sums)
        recorder.launch("flex_row_sums", [grad, output], [products])
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        read = [query, key, value, grad, row_sums, products, *ctx.lists]
        recorder.launch("_flex_attention_backward", read, grads, 2.5 * ctx.flops)
        return *grads, None, None, None
