"""Which kernel torch's scaled_dot_product_attention takes on a CUDA device.

The rules are those of torch's own choice, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for torch 2.13 with
cuDNN 9.15.1 or newer, in training, with tensors of four dimensions. There is no such choice in a CPU build.

cuDNN's operator takes any probability of dropout, but some of its kernels round it to sixteenths: torch hands cuDNN
multiples of 1/16 alone (``check_cudnn_dropout``, pytorch/pytorch #174245 of February 2026), since 0.1 would become
another probability. Nor is cuDNN's kernel a deterministic algorithm (``check_cudnn_deterministic``).
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_FLASH_HEAD = 256
_MAX_CUDNN_HEAD = 128
_CUDNN_DROPOUT_STEPS = 16
_PREFERS_CUDNN = (9, 10)
"""Major capabilities on which cuDNN comes first; elsewhere it is not among the choices."""
_NO_WIDE_FLASH = ((8, 6), (8, 9), (12, 0), (12, 1))


@dataclass(frozen=True)
class AttentionCall:
    """Describe a call: what the choice of a kernel depends on.

    ``has_mask`` is an explicit mask or bias; ``has_groups`` fewer heads of keys than of queries; ``is_deterministic``
    that torch was told to use deterministic algorithms.
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
        """Return whether the number format is one of 16 bits."""
        return self.dtype in ("float16", "bfloat16")


def choose_attention_kernel(call: AttentionCall, capability: tuple[int, int]) -> str:
    """Return ``cudnn``, ``flash``, ``efficient`` or ``math``: the first in that order which can serve the call."""
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
