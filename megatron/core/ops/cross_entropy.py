"""Softmax cross-entropy rows over some columns of the vocabulary: the normalizer, and the gradient in place.

The torch version processes the logits in slabs of rows that fit into a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.ops.triton_support import runs_on_triton
from megatron.core.precision import arithmetic_dtype

_SLAB_ELEMENTS = 1 << 19
_CUDA_SLAB_ELEMENTS = 1 << 28


def normalizer_and_label_logits(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row's log-sum-exp over its first ``num_columns`` columns, and the logit of its label.

    A label outside these columns gives 0.

    Shapes: ``logits: [n, v], labels: [n] -> [n], [n]`` in float32 (float64 for float64 logits).
    """
    if _takes_triton(logits):
        from megatron.core.ops.triton import normalizer_and_label_logits as on_triton

        return on_triton(logits, labels, num_columns)
    real = logits[:, :num_columns]
    label_logits = torch.zeros(logits.shape[0], dtype=arithmetic_dtype(logits.dtype), device=logits.device)
    normalizer = torch.full_like(label_logits, -torch.inf)
    if num_columns:
        for slab, wide, softmax in _slab_softmax(real):
            # The largest probability is 1 / sum(exp(logit - maximum)).
            normalizer[slab] = wide.amax(dim=1) - softmax.amax(dim=1).log_()
        columns, elsewhere = _columns(labels, num_columns)
        label_logits = real.gather(1, columns).squeeze(1).to(label_logits.dtype).masked_fill_(elsewhere, 0)
    return normalizer, label_logits


def overwrite_with_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_columns: int,
    normalizer: torch.Tensor,
    log_normalizer: torch.Tensor,
    row_grad: torch.Tensor,
) -> None:
    """Overwrite every row's logits with the gradient of its loss, and columns after ``num_columns`` with zeros.

    ``normalizer`` is the log-sum-exp over these columns, ``log_normalizer`` the log-sum-exp over the whole vocabulary.

    Shapes: ``logits: [n, v]``, the others ``[n]``.
    """
    if _takes_triton(logits):
        from megatron.core.ops.triton import overwrite_with_gradient as on_triton

        on_triton(logits, labels, num_columns, log_normalizer, row_grad)
        return
    real = logits[:, :num_columns]
    if num_columns:
        columns, elsewhere = _columns(labels, num_columns)
        label_grad = row_grad.masked_fill(elsewhere, 0).neg_()
        # The softmax over the whole vocabulary is the softmax over these columns times their total probability.
        row_factor = row_grad * (normalizer - log_normalizer).exp()
        for slab, _, softmax in _slab_softmax(real):
            softmax.mul_(row_factor[slab, None])
            # Subtract before rounding to low precision, which would lose p - 1 of a confident label.
            softmax.scatter_add_(1, columns[slab], label_grad[slab, None])
            real[slab] = softmax
    logits[:, num_columns:] = 0


def _takes_triton(logits: torch.Tensor) -> bool:
    return logits.is_contiguous() and runs_on_triton(logits)


def _columns(labels: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of every label, 0 for labels outside the columns, and which labels those are."""
    elsewhere = (labels < 0) | (labels >= num_columns)
    return labels.masked_fill(elsewhere, 0)[:, None], elsewhere


def _slabs(logits: torch.Tensor) -> Iterator[slice]:
    rows = _rows_per_slab(logits)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


def _rows_per_slab(logits: torch.Tensor) -> int:
    elements = _CUDA_SLAB_ELEMENTS if logits.is_cuda else _SLAB_ELEMENTS
    return max(1, min(elements // max(1, logits.shape[1]), logits.shape[0]))


def _slab_softmax(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield each slab's rows with the logits and their softmax, both in the arithmetic dtype.

    All slabs reuse the memory of the two tensors, because allocating memory takes longer than the computation.
    """
    shape = (_rows_per_slab(logits), logits.shape[1])
    logits_memory, softmax_memory = logits.new_empty((2, *shape), dtype=arithmetic_dtype(logits.dtype)).unbind()
    for slab in _slabs(logits):
        num_rows = slab.stop - slab.start
        wide, softmax = logits_memory[:num_rows], softmax_memory[:num_rows]
        wide.copy_(logits[slab])
        torch.softmax(wide, dim=1, out=softmax)
        yield slab, wide, softmax
