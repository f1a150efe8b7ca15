"""Cross-entropy over logits whose vocabulary is sharded over the tensor-parallel group.

The logits are processed in slabs of rows that fit in a cache. For the backward pass only the logarithm of each row's
normalizer is kept; it overwrites the logits with their gradient. Padded columns do not enter the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.collectives import all_reduce
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group

_SLAB_ELEMENTS = 1 << 19
_CUDA_SLAB_ELEMENTS = 1 << 28


def _slabs(logits: torch.Tensor) -> Iterator[slice]:
    rows = _rows_per_slab(logits)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


def _rows_per_slab(logits: torch.Tensor) -> int:
    elements = _CUDA_SLAB_ELEMENTS if logits.is_cuda else _SLAB_ELEMENTS
    return max(1, min(elements // max(1, logits.shape[1]), logits.shape[0]))


def _slab_softmax(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield each slab's rows with the logits and their softmax, both in the arithmetic dtype.

    Every slab reuses the memory of the two tensors: allocating new memory takes longer than the computation.
    """
    shape = (_rows_per_slab(logits), logits.shape[1])
    logits_memory, softmax_memory = logits.new_empty((2, *shape), dtype=arithmetic_dtype(logits.dtype)).unbind()
    for slab in _slabs(logits):
        num_rows = slab.stop - slab.start
        wide, softmax = logits_memory[:num_rows], softmax_memory[:num_rows]
        wide.copy_(logits[slab])
        torch.softmax(wide, dim=1, out=softmax)
        yield slab, wide, softmax


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first_column: int, num_columns: int, tp: Group
    ) -> torch.Tensor:
        flat = logits.detach().reshape(-1, logits.shape[-1])
        real = flat[:, :num_columns]
        local_labels = labels.reshape(-1) - first_column
        elsewhere = (local_labels < 0) | (local_labels >= num_columns)
        local_labels = local_labels.masked_fill(elsewhere, 0)
        dtype = arithmetic_dtype(logits.dtype)

        label_logits = torch.zeros(flat.shape[0], dtype=dtype, device=logits.device)
        local_normalizer = torch.full_like(label_logits, -torch.inf)
        if num_columns:
            for slab, wide, softmax in _slab_softmax(real):
                # The largest probability is 1 over the sum of exp(logit - maximum).
                local_normalizer[slab] = wide.amax(dim=1) - softmax.amax(dim=1).log_()
            label_logits = real.gather(1, local_labels[:, None]).squeeze(1).to(dtype).masked_fill_(elsewhere, 0)
        log_normalizer = local_normalizer
        if tp.size > 1:
            log_normalizer, label_logits = _combine(local_normalizer, label_logits, tp)
        ctx.save_for_backward(logits, local_normalizer - log_normalizer, local_labels, elsewhere)
        ctx.num_columns = num_columns
        return (log_normalizer - label_logits).reshape(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, log_share, local_labels, elsewhere = ctx.saved_tensors
        num_columns: int = ctx.num_columns
        # The logits are this function's own from here on: nothing else of the graph reads them again.
        result = logits.detach().reshape(-1, logits.shape[-1])
        real = result[:, :num_columns]
        row_grad = grad.reshape(-1).to(log_share.dtype)
        label_grad = row_grad.masked_fill(elsewhere, 0).neg_()
        # The softmax over this rank's columns, times this rank's share of the whole, is the whole's softmax.
        row_factor = row_grad * log_share.exp()
        if num_columns:
            for slab, _, softmax in _slab_softmax(real):
                softmax.mul_(row_factor[slab, None])
                # Before the rounding to a low precision: a confident label's p - 1 would be lost in it.
                softmax.scatter_add_(1, local_labels[slab, None], label_grad[slab, None])
                real[slab] = softmax
        result[:, num_columns:] = 0
        return result.reshape(logits.shape), None, None, None, None


def _combine(
    local_normalizer: torch.Tensor, label_logits: torch.Tensor, tp: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the whole rows' normalizers, and each label's logit from the rank that has it."""
    maxima = local_normalizer.clone()
    all_reduce(maxima, tp, op="max")
    sums = torch.stack(((local_normalizer - maxima).exp_(), label_logits))
    all_reduce(sums, tp)
    return sums[0].log_().add_(maxima), sums[1]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group
) -> torch.Tensor:
    """Return the negative log-likelihood of every label.

    ``vocab_size`` is the unpadded size. The backward pass reuses the memory of ``logits``: they must not be read after
    it, nor differentiated twice.

    Shapes: ``logits: [..., v/tp], labels: [...] -> [...]`` in float32 (float64 for float64 logits).
    """
    first_column = tp.rank * logits.shape[-1]
    num_columns = min(max(vocab_size - first_column, 0), logits.shape[-1])
    result: torch.Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, first_column, num_columns, tp
    )
    return result
