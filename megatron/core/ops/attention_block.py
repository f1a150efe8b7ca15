"""Blockwise attention: output and log-sum-exp of a block of keys, its gradients, and the merging of blocks.

All tensors here are ``[b, heads, s, d]``. The log-sum-exp of every row allows attention to a whole sequence to be
computed block by block (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867; Dao et al. 2022,
https://arxiv.org/abs/2205.14135). A block's gradients need only the total log-sum-exp of each row from the other
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend

from megatron.core.device import compute_capability
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.flash_implementation import active_flash_implementation
from megatron.core.precision import arithmetic_dtype

_FIRST_WITH_FLASH = (8, 0)
_WITH_WIDE_FLASH = ((8, 0), (9, 0), (10, 0), (10, 3))
MAX_SCORES = 2**24
"""Maximum number of scores in memory at once if no fused kernel computes a block: 64 MiB of float32."""


@dataclass(frozen=True)
class BlockMask:
    """Attention mask and dropout of a block.

    ``visible`` is a bool tensor (``[b or 1, 1, sq, sk]``), True where a query may attend, or None. With None a query
    attends to all keys, or, if ``is_causal``, to the keys up to its own position in a block of equally many keys and
    queries. ``dropout`` is for the block's queries and keys.
    """

    visible: torch.Tensor | None = None
    is_causal: bool = False
    dropout: AttentionDropout | None = None

    def rows(self, start: int, end: int, num_keys: int, device: torch.device) -> BlockMask:
        """Return the mask of a range of the queries."""
        visible = None if self.visible is None else self.visible[:, :, start:end]
        if visible is None and self.is_causal:
            visible = torch.ones(end - start, num_keys, dtype=torch.bool, device=device).tril(start)[None, None]
        dropout = replace(self.dropout, queries=self.dropout.queries[start:end]) if self.dropout else None
        return BlockMask(visible, dropout=dropout)


@dataclass(frozen=True)
class AttentionBlocks:
    """Compute blocks with torch's fused kernels if supported, or with unfused operations; ``plain`` forces the latter.

    On CUDA the fused kernel is FlashAttention 3 or 4 if torch's flash operators use it, else cuDNN's if
    `scaled_dot_product_attention` would choose it, else FlashAttention-2. All return the log-sum-exp of every row, and
    their backward passes take the log-sum-exp of all blocks together.

    With ``softcap`` operations are unfused, and a tanh keeps scores within that number of 0. Unfused operations process
    the queries in slices, so that about ``max_scores`` scores are in memory.
    """

    plain: bool = False
    softcap: float | None = None
    max_scores: int = MAX_SCORES

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output and log-sum-exp; 0 and −inf for a query that attends to none of the keys.

        Shapes: ``query: [b, n, sq, d]``, ``key, value: [b, g, sk, d]`` ``-> [b, n, sq, d]``, ``[b, n, sq]`` in at least
        float32.
        """
        if not self._has_kernel(query, mask):
            parts = [
                plain_block(query[:, :, rows], key, value, part, self.softcap)
                for rows, part in self._parts(query, key, mask)
            ]
            return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)
        if takes_cudnn(query, key, value, mask):
            output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, mask.is_causal
            )
            return output, logsumexp.squeeze(-1)
        if query.device.type == "cuda":
            output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, mask.is_causal
            )
            return output, logsumexp
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask.is_causal, attn_mask=_additive(mask, query.dtype)
        )
        if mask.visible is not None:
            # The kernel returns a log-sum-exp of 0 for such rows.
            blind = ~mask.visible.any(dim=-1)
            logsumexp = logsumexp.masked_fill(blind, -torch.inf)
            # In place, to keep the memory layout that the next layer reads.
            output.masked_fill_(blind[..., None], 0.0)
        return output, logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        mask: BlockMask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this block's part of the gradients of its queries, keys and values.

        ``output`` and ``logsumexp`` are the results of the queries' attention to all blocks together.
        """
        if not self._has_kernel(query, mask):
            return self._plain_backward(grad, query, key, value, output, logsumexp, mask)
        if takes_cudnn(query, key, value, mask):
            unused = torch.empty((), dtype=torch.int64, device=query.device)
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(grad, query, key, value, output, logsumexp.contiguous().unsqueeze(-1), unused, unused, None),
                *(None, None, query.shape[2], key.shape[2], 0.0, mask.is_causal),
            )
        elif query.device.type == "cuda":
            unused = torch.empty((), dtype=torch.uint64, device=query.device)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *(grad, query, key, value, output, logsumexp.contiguous()),
                *(None, None, query.shape[2], key.shape[2], 0.0, mask.is_causal, unused, unused),
            )
        else:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad, query, key, value, output, logsumexp, 0.0, mask.is_causal),
                attn_mask=_additive(mask, query.dtype),
            )
        grad_query, grad_key, grad_value = grads
        return grad_query, grad_key, grad_value

    def _plain_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        mask: BlockMask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = arithmetic_dtype(query.dtype)
        grad_queries = []
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=wide) for tensor in (key, value))
        for rows, part in self._parts(query, key, mask):
            grads = plain_block_backward(
                *(grad[:, :, rows], query[:, :, rows], key, value, output[:, :, rows], logsumexp[:, :, rows]),
                *(part, self.softcap),
            )
            grad_queries.append(grads[0])
            grad_key += grads[1]
            grad_value += grads[2]
        return torch.cat(grad_queries, dim=2), grad_key.to(key.dtype), grad_value.to(value.dtype)

    def has_kernel(
        self, device_type: str, dtype: torch.dtype, head_dim: int, *, has_mask: bool, has_dropout: bool
    ) -> bool:
        """Return whether a flash kernel computes blocks; otherwise operations are unfused."""
        if self.plain or self.softcap is not None or has_dropout:
            return False
        if device_type == "cpu":
            return True
        if device_type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or has_mask:
            return False
        return has_flash_kernel(compute_capability(torch.device(device_type)), head_dim)

    def _has_kernel(self, query: torch.Tensor, mask: BlockMask) -> bool:
        return self.has_kernel(
            *(query.device.type, query.dtype, query.shape[-1]),
            has_mask=mask.visible is not None,
            has_dropout=mask.dropout is not None,
        )

    def _parts(self, query: torch.Tensor, key: torch.Tensor, mask: BlockMask) -> Iterator[tuple[slice, BlockMask]]:
        """Yield slices of the queries that are processed at once, and their masks."""
        length, num_keys = query.shape[2], key.shape[2]
        at_once = max(1, self.max_scores // (query.shape[0] * query.shape[1] * num_keys))
        if at_once >= length:
            yield slice(0, length), mask
            return
        for start in range(0, length, at_once):
            end = min(start + at_once, length)
            yield slice(start, end), mask.rows(start, end, num_keys, query.device)


def takes_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask) -> bool:
    """Return whether torch's `scaled_dot_product_attention` would choose cuDNN's kernel for a block.

    FlashAttention 3 and 4 are used only if the user selects them, and have priority.
    """
    if query.device.type != "cuda" or mask.visible is not None or active_flash_implementation() is not None:
        return False
    has_groups = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, mask.is_causal, enable_gqa=has_groups)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def has_flash_kernel(capability: tuple[int, int] | None, head_dim: int) -> bool:
    """Return whether torch's CUDA flash operators support this head width in training."""
    active = active_flash_implementation()
    if active is not None:
        return active.takes_widths(head_dim, head_dim, capability)
    return head_dim % 8 == 0 and head_dim <= widest_flash_head(capability)


def widest_flash_head(capability: tuple[int, int] | None) -> int:
    """Return the maximum head width that torch's CUDA flash kernel supports in training; 0 before Ampere.

    An unknown compute capability counts as one that supports the maximum.
    """
    if capability is not None and capability < _FIRST_WITH_FLASH:
        return 0
    return 256 if capability is None or capability in _WITH_WIDE_FLASH else 192


def merge_block(
    output: torch.Tensor, logsumexp: torch.Tensor, block_output: torch.Tensor, block_logsumexp: torch.Tensor
) -> None:
    """Merge a block into the output and log-sum-exp of the previous blocks, in place.

    Rows that attend to nothing in either have a log-sum-exp of −inf and stay 0.

    Shapes: outputs ``[b, n, sq, d]``, log-sum-exps ``[b, n, sq]``, all in at least float32.
    """
    total = torch.logaddexp(logsumexp, block_logsumexp)
    finite = _finite(total)
    output.mul_((logsumexp - finite).exp()[..., None])
    output.addcmul_(block_output.to(output.dtype), (block_logsumexp - finite).exp()[..., None])
    logsumexp.copy_(total)


def plain_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a block with unfused operations: the reference for the kernels, and the fallback without one."""
    heads_per_group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    scores = _masked(_scores(query, key, softcap), mask)
    logsumexp = scores.logsumexp(dim=-1)
    weights = (scores - _finite(logsumexp)[..., None]).exp()
    if mask.dropout:
        weights = mask.dropout.drop(weights)
    return weights.to(query.dtype) @ value, logsumexp


def plain_block_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: BlockMask,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a block's gradients with unfused operations."""
    groups, heads_per_group = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    scores = _scores(query, key, softcap)
    weights = (_masked(scores, mask) - _finite(logsumexp)[..., None]).exp()
    wide = weights.dtype
    grad_weights = (grad @ value.mT).to(wide)
    kept = weights
    if mask.dropout:
        kept, grad_weights = mask.dropout.drop(weights), mask.dropout.drop(grad_weights)
    row_sums = (grad.to(wide) * output.to(wide)).sum(dim=-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_sums) * query.shape[-1] ** -0.5
    if softcap is not None:
        grad_scores = grad_scores * (1 - (scores / softcap).square())
    grad_scores = grad_scores.to(query.dtype)
    grad_key, grad_value = grad_scores.mT @ query, kept.to(query.dtype).mT @ grad
    return grad_scores @ key, *(
        tensor.unflatten(1, (groups, heads_per_group)).sum(dim=2) for tensor in (grad_key, grad_value)
    )


def _scores(query: torch.Tensor, key: torch.Tensor, softcap: float | None) -> torch.Tensor:
    # A dot product of float16 heads can overflow before it is scaled.
    wide = arithmetic_dtype(query.dtype)
    scores: torch.Tensor = (query.to(wide) @ key.to(wide).mT) * query.shape[-1] ** -0.5
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _masked(scores: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    visible = mask.visible
    if visible is None and mask.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _finite(logsumexp: torch.Tensor) -> torch.Tensor:
    """Replace −inf by 0, so that subtracting it from scores of −inf gives weights of 0 and not NaN."""
    return logsumexp.masked_fill(logsumexp.isneginf(), 0.0)


def _additive(mask: BlockMask, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask in the form that the CPU kernel requires: additive, in the dtype of the queries."""
    if mask.visible is None:
        return None
    return torch.zeros_like(mask.visible, dtype=dtype).masked_fill(~mask.visible, -torch.inf)
