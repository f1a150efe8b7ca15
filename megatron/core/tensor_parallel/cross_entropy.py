"""Cross-entropy over logits whose vocabulary is sharded over the tensor-parallel group.

For the backward pass only the log-sum-exp of each row is saved. The gradient overwrites the logits. Padded columns are
excluded from the softmax.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.collectives import all_reduce
from megatron.core.ops import normalizer_and_label_logits, overwrite_with_gradient
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.process_state import resolve_group
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

if TYPE_CHECKING:
    from megatron.core.process_state import AnyGroup


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first_column: int,
        num_columns: int,
        tp: Group,
        with_normalizers: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        flat = logits.detach().reshape(-1, logits.shape[-1])
        local_labels = labels.reshape(-1) - first_column if first_column else labels.reshape(-1)
        local_normalizer, label_logits = normalizer_and_label_logits(flat, local_labels, num_columns)
        log_normalizer = local_normalizer
        if tp.size > 1:
            log_normalizer, label_logits = combine_normalizers(local_normalizer, label_logits, tp)
        ctx.save_for_backward(logits, local_labels, local_normalizer, log_normalizer)
        ctx.num_columns = num_columns
        losses = (log_normalizer - label_logits).reshape(labels.shape)
        if not with_normalizers:
            return losses
        # A copy, because a saved tensor must not be an output, which the caller may modify.
        return losses, log_normalizer.clone().reshape(labels.shape)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, normalizer_grad: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, local_labels, local_normalizer, log_normalizer = ctx.saved_tensors
        # The logits may be overwritten from here on: nothing else in the graph reads them again.
        result = logits.detach().reshape(-1, logits.shape[-1])
        row_grad = grad.reshape(-1).to(log_normalizer.dtype)
        further = None if normalizer_grad is None else normalizer_grad.reshape(-1).to(log_normalizer.dtype)
        overwrite_logits(result, local_labels, ctx.num_columns, local_normalizer, log_normalizer, row_grad, further)
        return result.reshape(logits.shape), None, None, None, None, None


def overwrite_logits(
    logits: torch.Tensor,
    local_labels: torch.Tensor,
    num_columns: int,
    local_normalizer: torch.Tensor,
    log_normalizer: torch.Tensor,
    row_grad: torch.Tensor,
    normalizer_grad: torch.Tensor | None,
) -> None:
    """Overwrite logits with their gradient, given the gradients of the losses and of the log-sum-exps.

    Shapes: ``logits: [n, v/tp]``, the others ``[n]``.
    """
    sums = row_grad if normalizer_grad is None else row_grad + normalizer_grad
    overwrite_with_gradient(logits, local_labels, num_columns, local_normalizer, log_normalizer, sums)
    if normalizer_grad is not None:
        # The normalizer does not depend on the label's column.
        is_here = (local_labels >= 0) & (local_labels < num_columns)
        columns = local_labels.masked_fill(~is_here, 0)[:, None]
        logits.scatter_add_(1, columns, (normalizer_grad * is_here).to(logits.dtype)[:, None])


def combine_normalizers(
    local_normalizer: torch.Tensor, label_logits: torch.Tensor, tp: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of the whole rows, and each label's logit from the rank that has it."""
    maxima = local_normalizer.clone()
    all_reduce(maxima, tp, op="max")
    sums = torch.stack(((local_normalizer - maxima).exp_(), label_logits))
    all_reduce(sums, tp)
    return sums[0].log_().add_(maxima), sums[1]


def vocab_sharded_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Return the negative log-likelihood of every label.

    ``vocab_size`` is the unpadded size. The backward pass reuses the memory of ``logits``: after it they must not be
    read, nor differentiated again.

    Shapes: ``logits: [..., v/tp], labels: [...] -> [...]`` in float32 (float64 for float64 logits).
    """
    result: torch.Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, *_columns_of_rank(logits, vocab_size, tp), tp, False
    )
    return result


def vocab_parallel_losses_and_normalizers(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood of every label, and the log-sum-exp of every row.

    Both are differentiable; otherwise as `vocab_sharded_cross_entropy`.

    Shapes: ``logits: [..., v/tp], labels: [...] -> [...], [...]`` in float32 (float64 for float64 logits).
    """
    both: tuple[torch.Tensor, torch.Tensor] = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, *_columns_of_rank(logits, vocab_size, tp), tp, True
    )
    return both


class LossInputs:
    """Logits and labels of a micro-batch, from which a loss per token is computed without gathering the logits.

    ``labels: [s, b]`` are token ids, also at positions that the loss mask excludes. ``vocab_size`` is the unpadded size
    of the vocabulary.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group) -> None:
        self.labels = labels
        self.vocab_size = vocab_size
        self._given = logits
        self._tp = tp

    @functools.cached_property
    def logits(self) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary, in at least float32, as a copy.

        Shapes: ``-> [s, b, n]``, with the vocabulary's ids ``first_id`` to ``first_id + n - 1``.
        """
        # The backward pass of the cross-entropy overwrites the original.
        columns = self._given[..., : _columns_of_rank(self._given, self.vocab_size, self._tp)[1]]
        return columns.to(arithmetic_dtype(columns.dtype), copy=True)

    @property
    def first_id(self) -> int:
        """Return the token id of the first logit on this rank."""
        return _columns_of_rank(self._given, self.vocab_size, self._tp)[0]

    def cross_entropy(self) -> torch.Tensor:
        """Return the negative log-likelihood of the labels. Shapes: ``-> [s, b]``."""
        return self._both[0]

    def log_normalizers(self) -> torch.Tensor:
        """Return the log-sum-exp of the logits over the whole vocabulary. Shapes: ``-> [s, b]``."""
        return self._both[1]

    def sum_over_vocabulary(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values that belong to `logits` over the whole vocabulary; collective over tensor parallelism.

        Shapes: ``[s, b, n] -> [s, b]``.
        """
        return reduce_from_tensor_model_parallel_region(values.sum(dim=-1), self._tp)

    @functools.cached_property
    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_losses_and_normalizers(self._given, self.labels, self.vocab_size, self._tp)


class _SoftmaxCrossEntropy(torch.autograd.Function):
    """Cross-entropy that saves the softmax, in the order of operations of megatron-core, for bitwise equal losses."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, tp: Group) -> torch.Tensor:
        wide = logits.detach().to(arithmetic_dtype(logits.dtype))
        maxima = wide.amax(dim=-1)
        all_reduce(maxima, tp, op="max")
        shifted = wide - maxima.unsqueeze(-1)
        columns = target - tp.rank * logits.shape[-1]
        elsewhere = (columns < 0) | (columns >= logits.shape[-1])
        columns = columns.masked_fill(elsewhere, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, columns).squeeze(-1).masked_fill(elsewhere, 0)
        softmax = shifted.exp()
        totals = softmax.sum(dim=-1)
        for reduced in (of_target, totals):
            all_reduce(reduced, tp)
        losses = totals.log() - of_target
        softmax.div_(totals.unsqueeze(-1))
        vocab_size = logits.shape[-1] * tp.size
        ctx.mean_part, ctx.target_part = smoothing / vocab_size, 1.0 - smoothing
        if smoothing:
            log_probabilities = (shifted - totals.log().unsqueeze(-1)).sum(dim=-1)
            all_reduce(log_probabilities, tp)
            losses = ctx.target_part * losses - ctx.mean_part * log_probabilities
        ctx.save_for_backward(softmax, columns, elsewhere)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, columns, elsewhere = ctx.saved_tensors
        here = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        result = softmax - ctx.mean_part
        result.scatter_add_(-1, columns, -ctx.target_part * here)
        return result.mul_(grad.unsqueeze(-1)), None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: AnyGroup = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of every label, with megatron-core's signature and values.

    Unlike `vocab_sharded_cross_entropy` it leaves the logits unchanged and saves their softmax, and the vocabulary is
    not padded. ``label_smoothing`` is the probability of the labels that are not the target, over the whole vocabulary
    (megatron-core smooths over the rank's part of it). ``tp_group`` is by default the process-wide group.

    Shapes: ``vocab_parallel_logits: [..., v/tp], target: [...] -> [...]`` in float32 (float64 for float64 logits).

    Raises:
        AssertionError: ``label_smoothing`` is not in [0, 1).
    """
    assert 0.0 <= label_smoothing < 1.0, f"label_smoothing is {label_smoothing}; it must be in [0, 1)"
    tp = resolve_group(tp_group)
    vocab_size = vocab_parallel_logits.shape[-1] * tp.size
    smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    result: torch.Tensor = _SoftmaxCrossEntropy.apply(  # type: ignore[no-untyped-call]
        vocab_parallel_logits, target, smoothing, tp
    )
    return result


def _columns_of_rank(logits: torch.Tensor, vocab_size: int, tp: Group) -> tuple[int, int]:
    """Return a rank's first vocabulary column, and its number of columns without padding."""
    first_column = tp.rank * logits.shape[-1]
    return first_column, min(max(vocab_size - first_column, 0), logits.shape[-1])
