"""Output layer and vocabulary-parallel cross-entropy in chunks of tokens, so that all logits never exist at once.

The forward pass keeps the log-sum-exp of each row, and the logits of the last chunk. The backward pass computes the
logits of the other chunks again: one more GEMM for these. Its gradients are those of a separate output layer and loss.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.collectives import all_gather_first_dim, all_reduce, reduce_scatter_first_dim
from megatron.core.device import is_captured
from megatron.core.main_grad import main_grad_of
from megatron.core.ops import linear, linear_into, normalizer_and_label_logits, product
from megatron.core.process_group import Group
from megatron.core.sharding import quantized_of
from megatron.core.tensor_parallel.cross_entropy import combine_normalizers, overwrite_logits
from megatron.core.tensor_parallel.loss_chunks import chunk_rows
from megatron.core.tensor_parallel.mappings import InputRegion


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        region: InputRegion,
        tp: Group,
        library: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.quantized = quantized_of(weight)
        dense = weight if ctx.quantized is None else ctx.quantized.dense()
        full_x = all_gather_first_dim(x, tp) if region is InputRegion.SEQUENCE else x
        rows, width = full_x.reshape(-1, full_x.shape[-1]), dense.shape[0]
        first_column = tp.rank * width
        num_columns = min(max(vocab_size - first_column, 0), width)
        local_labels = labels.reshape(-1) - first_column
        size = chunk_rows(len(rows), width)
        found, logits = [], rows.new_empty(0, width)
        for start in range(0, len(rows), size):
            chunk = slice(start, start + size)
            del logits
            logits = linear(rows[chunk], dense, library=library)
            found.append(normalizer_and_label_logits(logits, local_labels[chunk], num_columns))
        local_normalizer, label_logits = (torch.cat(parts) for parts in zip(*found))
        log_normalizer = local_normalizer
        if tp.size > 1:
            log_normalizer, label_logits = combine_normalizers(local_normalizer, label_logits, tp)
        saved_weight = weight if ctx.quantized is None else None
        ctx.save_for_backward(x, saved_weight, local_labels, local_normalizer, log_normalizer)
        # No saved tensor, which would stay in memory until the end of the backward pass.
        ctx.last_logits = logits if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else None
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.num_columns, ctx.region, ctx.tp, ctx.product_library = num_columns, region, tp, library
        # Without a loss of the log-sum-exps nothing is added for them, rather than zeros.
        ctx.set_materialize_grads(False)
        losses = (log_normalizer - label_logits).reshape(labels.shape)
        # A copy, because a saved tensor must not be an output, which the caller may modify.
        return losses, log_normalizer.clone().reshape(labels.shape)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, normalizer_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, local_labels, local_normalizer, log_normalizer = ctx.saved_tensors
        last_logits = ctx.last_logits
        if not is_captured(x):
            # A CUDA graph that reads the logits of another graph must keep them.
            ctx.last_logits = None
        tp: Group = ctx.tp
        library: str = ctx.product_library
        needs_x_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        weight = weight if ctx.quantized is None else ctx.quantized.dense()
        full_x = all_gather_first_dim(x, tp) if ctx.region is InputRegion.SEQUENCE else x
        rows = full_x.reshape(-1, full_x.shape[-1])
        size = chunk_rows(len(rows), weight.shape[0])
        row_grad = torch.zeros_like(log_normalizer) if grad is None else grad.reshape(-1).to(log_normalizer.dtype)
        per_row = [local_labels, local_normalizer, log_normalizer, row_grad]
        if normalizer_grad is not None:
            per_row.append(normalizer_grad.reshape(-1).to(log_normalizer.dtype))
        x_grad = torch.empty_like(rows) if needs_x_grad else None
        weight_grad: torch.Tensor | None = None
        for start in reversed(range(0, len(rows), size)):
            chunk = slice(start, start + size)
            some = rows[chunk]
            logits = linear(some, weight, library=library) if last_logits is None else last_logits
            last_logits = None
            some_labels, some_local, some_log, *grads = (each[chunk] for each in per_row)
            overwrite_logits(
                *(logits, some_labels, ctx.num_columns, some_local, some_log, grads[0]),
                grads[1] if len(grads) > 1 else None,
            )
            if x_grad is not None:
                linear_into(x_grad[chunk], logits, weight.t(), library=library)
            if needs_weight_grad:
                if ctx.main_grad is not None:
                    ctx.main_grad.add_matmul_chunk(logits.t(), some, library)
                else:
                    part = product(logits.t(), some, library)
                    weight_grad = part if weight_grad is None else weight_grad.add_(part)
            del logits
        if needs_weight_grad and ctx.main_grad is not None:
            ctx.main_grad.end_contribution()
        if x_grad is None:
            return None, weight_grad, *(None,) * 5
        x_grad = x_grad.view(full_x.shape)
        if ctx.region is InputRegion.SEQUENCE:
            x_grad = reduce_scatter_first_dim(x_grad, tp)
        elif ctx.region is InputRegion.REPLICATED:
            all_reduce(x_grad, tp)
        return x_grad, weight_grad, *(None,) * 5


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    region: InputRegion,
    tp: Group,
    library: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood of every label under ``x @ weight.T``, and the log-sum-exp of every row.

    Both are differentiable. ``vocab_size`` is the unpadded size, and ``weight`` is this rank's shard of the output
    layer. The weight's gradient is one contribution to its main gradient, which is never deferred.

    Shapes: ``x: [s, b, h]`` (``[s/tp, b, h]`` for region SEQUENCE), ``weight: [v/tp, h]``, ``labels: [s, b] -> [s, b],
    [s, b]`` in float32 (float64 for float64).
    """
    both: tuple[torch.Tensor, torch.Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, labels, vocab_size, region, tp, library
    )
    return both
