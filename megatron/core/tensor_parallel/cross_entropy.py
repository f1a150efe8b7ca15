"""Cross-entropy over logits whose vocabulary is cut over the tensor-parallel group.

The logits are walked in slabs of rows that fit in a cache; only the sum of exponentials is kept for the backward pass,
which overwrites the logits with their gradient. Padded columns do not enter the softmax.
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
    elements = _CUDA_SLAB_ELEMENTS if logits.is_cuda else _SLAB_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


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

        maxima = torch.full((flat.shape[0],), -torch.inf, dtype=dtype, device=logits.device)
        # Row 0: sum of exponentials; row 1: the label's logit.
        sums = torch.zeros((2, flat.shape[0]), dtype=dtype, device=logits.device)
        if num_columns:
            if tp.size == 1:
                for slab in _slabs(real):
                    rows = real[slab].to(dtype)
                    maxima[slab] = rows.amax(dim=1)
                    sums[0, slab] = (rows - maxima[slab, None]).exp_().sum(dim=1)
            else:
                for slab in _slabs(real):
                    maxima[slab] = real[slab].amax(dim=1).to(dtype)
            sums[1] = real.gather(1, local_labels[:, None]).squeeze(1).to(dtype).masked_fill_(elsewhere, 0)
        if tp.size > 1:
            all_reduce(maxima, tp, op="max")
            if num_columns:
                for slab in _slabs(real):
                    sums[0, slab] = (real[slab].to(dtype) - maxima[slab, None]).exp_().sum(dim=1)
            all_reduce(sums, tp)
        log_normalizer = sums[0].log_().add_(maxima)
        ctx.save_for_backward(logits, log_normalizer, local_labels, elsewhere)
        ctx.num_columns = num_columns
        return (log_normalizer - sums[1]).reshape(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, log_normalizer, local_labels, elsewhere = ctx.saved_tensors
        num_columns: int = ctx.num_columns
        # The logits are this function's own from here on: nothing else of the graph reads them again.
        result = logits.detach().reshape(-1, logits.shape[-1])
        real = result[:, :num_columns]
        row_grad = grad.reshape(-1).to(log_normalizer.dtype)
        label_grad = row_grad.masked_fill(elsewhere, 0).neg_()
        if num_columns:
            for slab in _slabs(real):
                rows = real[slab]
                scratch = rows if rows.dtype == log_normalizer.dtype else rows.to(log_normalizer.dtype)
                scratch.sub_(log_normalizer[slab, None]).exp_().mul_(row_grad[slab, None])
                # Before the rounding to a low precision: a confident label's p - 1 would be lost in it.
                scratch.scatter_add_(1, local_labels[slab, None], label_grad[slab, None])
                if scratch is not rows:
                    rows.copy_(scratch)
        result[:, num_columns:] = 0
        return result.reshape(logits.shape), None, None, None, None


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
