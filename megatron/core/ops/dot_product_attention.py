"""Core attention, softmax(q kᵀ / √d) v, with torch's fused kernels or unfused operations.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Dao et al. 2022, https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron.core.device import seeded_generator
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.precision import arithmetic_dtype


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of core attention; ``sinks`` are the scores of one additional key per head, whose value is 0.

    Shapes: ``query: [sq, b, n, d]``, ``key, value: [sk, b, g, d]``, ``sinks: [n]``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pattern: AttentionPattern
    dropout: AttentionDropout | None = None
    sinks: torch.Tensor | None = None

    @property
    def num_queries(self) -> int:
        return self.query.shape[0]

    @property
    def num_keys(self) -> int:
        return self.key.shape[0]

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @property
    def dropout_probability(self) -> float:
        return self.dropout.probability if self.dropout else 0.0

    @property
    def has_groups(self) -> bool:
        """Return whether several query heads share a key-value head (GQA)."""
        return self.key.shape[2] != self.query.shape[2]


class AttentionCore(Protocol):
    """Interface of core attention implementations."""

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the attention output. Shapes: ``-> [sq, b, n, d]``."""


def plain_attention(inputs: AttentionInputs, softcap: float | None = None) -> torch.Tensor:
    """Compute attention with unfused operations and the softmax in at least float32: the reference for fused kernels.

    With ``softcap`` a tanh keeps the scores within that number of 0.
    """
    query, key, value = inputs.heads
    groups = key.shape[2]
    heads_per_group = query.shape[2] // groups
    key = key.repeat_interleave(heads_per_group, dim=2)
    value = value.repeat_interleave(heads_per_group, dim=2)
    visible = inputs.pattern.matrix(inputs.num_queries, inputs.num_keys, query.device)
    # A dot product of float16 heads can overflow 65,504 before it is scaled.
    wide = arithmetic_dtype(query.dtype)
    scores = torch.einsum("qbnd,kbnd->bnqk", query.to(wide), key.to(wide)) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if inputs.sinks is not None:
        of_sinks = inputs.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, of_sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    if inputs.sinks is not None:
        weights = weights[..., :-1]
    if inputs.dropout:
        weights = inputs.dropout.drop(weights)
    return torch.einsum("bnqk,kbnd->qbnd", weights, value)


def fused_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention with torch's scaled_dot_product_attention, which chooses the kernel.

    On CPU torch has no fused kernel with dropout. `plain_attention` is used instead, which drops the same weights in
    any layout.
    """
    assert inputs.sinks is None, "the kernels have no sinks"
    query, key, value = inputs.heads
    pattern = inputs.pattern
    if inputs.dropout and query.device.type == "cpu":
        return plain_attention(inputs)
    num_queries, num_keys = inputs.num_queries, inputs.num_keys
    # The kernels' causal mask assumes equally many queries and keys; a single query attends to all keys.
    needs_no_matrix = pattern.is_plain_causal and num_queries in (1, num_keys)
    with drawing_as(inputs.dropout, query.device):
        context = F.scaled_dot_product_attention(
            *(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)),
            attn_mask=None if needs_no_matrix else pattern.matrix(num_queries, num_keys, query.device),
            dropout_p=inputs.dropout_probability,
            is_causal=needs_no_matrix and num_queries > 1,
            enable_gqa=inputs.has_groups,
        )
    return context.permute(2, 0, 1, 3)


class _BatchedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        length, size, heads = query.shape[:3]
        # [b n, s, d]; views of the fused projection's output.
        query, key, value = (_batched(tensor) for tensor in (query, key, value))
        scale = query.shape[-1] ** -0.5
        mask = query.new_zeros(length, length)
        if is_causal:
            mask.fill_(-torch.inf).triu_(1)
        weights = torch.baddbmm(mask, query, key.mT, alpha=scale)
        torch.softmax(weights, dim=-1, out=weights)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale, ctx.batch = scale, (size, heads)
        return _unbatched(torch.bmm(weights, value), ctx.batch)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        grad = _batched(grad)
        grad_value = torch.bmm(weights.mT, grad)
        grad_weights = torch.bmm(grad, value.mT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        unused = grad.new_empty(())
        grad_query = torch.baddbmm(unused, grad_scores, key, beta=0, alpha=ctx.scale)
        grad_key = torch.baddbmm(unused, grad_scores.mT, query, beta=0, alpha=ctx.scale)
        return *(_unbatched(each, ctx.batch) for each in (grad_query, grad_key, grad_value)), None


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """Shapes: ``[s, b, n, d] -> [b n, s, d]``."""
    return tensor.flatten(1, 2).transpose(0, 1)


def _unbatched(tensor: torch.Tensor, batch: tuple[int, int]) -> torch.Tensor:
    """Shapes: ``[b n, s, d] -> [s, b, n, d]``."""
    return tensor.view(*batch, *tensor.shape[1:]).permute(2, 0, 1, 3)


def batched_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention to whole sequences with batched GEMMs, which keep the weights for the backward pass.

    Queries and keys have the same positions and as many heads, and causality or its absence is the only rule. On a CPU
    this is faster than torch's fused kernel while sequences are short, and the weights take little memory.
    """
    assert inputs.sinks is None, "the kernel has no sinks"
    assert inputs.dropout is None, "the kernel has no dropout"
    result: torch.Tensor = _BatchedAttention.apply(*inputs.heads, inputs.pattern.is_causal)  # type: ignore[no-untyped-call]
    return result


def torch_flash_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention with torch's CUDA flash kernel, which supports windows and fewer queries than keys.

    Key-value heads are not repeated. The kernel supports float16 and bfloat16, head widths that are multiples of 8, and
    no documents.
    """
    assert inputs.sinks is None, "the kernel has no sinks"
    pattern, lengths = inputs.pattern, (inputs.num_queries, inputs.num_keys)
    with drawing_as(inputs.dropout, inputs.query.device):
        output, *_ = torch.ops.aten._flash_attention_forward(
            *(tensor.transpose(0, 1) for tensor in inputs.heads),
            *(None, None, *lengths, inputs.dropout_probability, pattern.is_causal, False),
            window_size_left=-1 if pattern.window is None else pattern.window - 1,
            window_size_right=0 if pattern.is_causal else -1,
        )
    context: torch.Tensor = output
    return context.transpose(0, 1)


def masked_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention on CUDA with torch's scaled_dot_product_attention, with a mask if needed.

    Key-value heads are repeated, because no fused kernel of torch supports both a mask and GQA, and without a fused
    kernel the scores of all heads are materialized. Layers share the mask of documents.
    """
    assert inputs.sinks is None, "the kernels have no sinks"
    query, key, value = inputs.heads
    pattern, num_queries, num_keys = inputs.pattern, inputs.num_queries, inputs.num_keys
    heads_per_group = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (key, value))
    mask: torch.Tensor | None = None
    is_causal = pattern.is_plain_causal and num_queries == num_keys
    if pattern.is_plain_causal and 1 < num_queries < num_keys:
        mask = lower_right_mask(num_queries, num_keys)
    elif not is_causal:
        mask = pattern.shared(
            ("added", num_queries, query.dtype),
            lambda: _added(pattern.matrix(num_queries, num_keys, query.device), query.dtype),
        )
    with drawing_as(inputs.dropout, query.device):
        context = F.scaled_dot_product_attention(
            *(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)),
            attn_mask=mask,
            dropout_p=inputs.dropout_probability,
            is_causal=is_causal,
        )
    return context.permute(2, 0, 1, 3)


def lower_right_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    """Return torch's causal mask aligned to the last key, which its kernels do not materialize."""
    # Imported here, because the import loads torch's compiler, which takes half of the startup time.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(num_queries, num_keys)


def _added(visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a bool mask to an additive one once, because torch would convert it in every layer."""
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)


def drawing_as(dropout: AttentionDropout | None, device: torch.device) -> AbstractContextManager[None]:
    """Make a library's kernel draw its dropout mask from the seed of ``dropout``."""
    return seeded_generator(device, dropout.seed) if dropout else nullcontext()
