"""Attention sinks for kernels without support for them: sinks are merged by the log-sum-exp of each row.

A sink is a key of one head whose score is the same for every query and whose value is 0 (Xiao et al. 2023,
https://arxiv.org/abs/2309.17453). With the log-sum-exp of a row it is merged like one more block. The backward pass is
the kernel's own, with an output and a log-sum-exp that include the sinks.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.ops.attention_block import AttentionBlocks, BlockMask
from megatron.core.ops.dot_product_attention import AttentionInputs, drawing_as
from megatron.core.precision import arithmetic_dtype


def merge_sinks(
    output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp after adding one sink per head to every row.

    Shapes: ``output: [b, n, sq, d]``, ``logsumexp: [b, n, sq]`` in at least float32, ``sinks: [n]``.
    """
    total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    return output * (logsumexp - total).exp()[..., None].to(output.dtype), total


def sinks_gradient(
    grad: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks; ``output`` and ``logsumexp`` include the sinks.

    Shapes: ``grad, output: [b, n, sq, d]``, ``logsumexp: [b, n, sq]`` ``-> [n]``.
    """
    wide = logsumexp.dtype
    shares = (sinks.to(wide)[:, None] - logsumexp).exp()
    row_sums = (grad.to(wide) * output.to(wide)).sum(dim=-1)
    return -(shares * row_sums).sum(dim=(0, 2)).to(sinks.dtype)


def attend_in_blocks(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention as one block: with torch's flash kernels if supported, else in slices of the queries."""
    pattern, num_queries, num_keys = inputs.pattern, inputs.num_queries, inputs.num_keys
    needs_no_matrix = pattern.is_plain_causal and num_queries in (1, num_keys)
    visible = None if needs_no_matrix else pattern.matrix(num_queries, num_keys, inputs.query.device)
    mask = BlockMask(visible, needs_no_matrix and num_queries > 1, inputs.dropout)
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in inputs.heads)
    context: torch.Tensor = _BlockWithSinks.apply(*heads_first, inputs.sinks, mask)  # type: ignore[no-untyped-call]
    return context.permute(2, 0, 1, 3)


class _BlockWithSinks(torch.autograd.Function):
    """Shapes: ``query: [b, n, sq, d]``, ``key, value: [b, g, sk, d]``, ``sinks: [n]`` ``-> [b, n, sq, d]``."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: BlockMask
    ) -> torch.Tensor:
        wide = arithmetic_dtype(query.dtype)
        output, logsumexp = AttentionBlocks().forward(query, key, value, mask)
        output, logsumexp = merge_sinks(output.to(wide), logsumexp.to(wide), sinks)
        output = output.to(query.dtype)
        ctx.mask = mask
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp = ctx.saved_tensors
        of_sinks = sinks_gradient(grad, output, logsumexp, sinks) if ctx.needs_input_grad[3] else None
        grads = AttentionBlocks().backward(grad, query, key, value, output, logsumexp, ctx.mask)
        return *grads, of_sinks, None


def torch_flash_with_sinks(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention with torch's CUDA flash kernel, with the same limits as `torch_flash_attention`."""
    pattern = inputs.pattern
    with drawing_as(inputs.dropout, inputs.query.device):
        context: torch.Tensor = _FlashWithSinks.apply(  # type: ignore[no-untyped-call]
            *(*(tensor.transpose(0, 1) for tensor in inputs.heads), inputs.sinks),
            *(pattern.is_causal, pattern.window, inputs.dropout_probability),
        )
    return context.transpose(0, 1)


class _FlashWithSinks(torch.autograd.Function):
    """Shapes: ``query: [b, sq, n, d]``, ``key, value: [b, sk, g, d]``, ``sinks: [n]`` ``-> [b, sq, n, d]``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        is_causal: bool,
        window: int | None,
        probability: float,
    ) -> torch.Tensor:
        lengths = (query.shape[1], key.shape[1])
        windows = {
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0 if is_causal else -1,
        }
        output, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            *(query, key, value, None, None, *lengths, probability, is_causal, False), **windows
        )
        heads_first, logsumexp = merge_sinks(output.transpose(1, 2).to(logsumexp.dtype), logsumexp, sinks)
        output = heads_first.transpose(1, 2).to(query.dtype)
        ctx.options = {"dropout_p": probability, "is_causal": is_causal, **windows}
        ctx.lengths = lengths
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp, seed, offset)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp, seed, offset = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3]:
            of_sinks = sinks_gradient(grad.transpose(1, 2), output.transpose(1, 2), logsumexp, sinks)
        num_queries, num_keys = ctx.lengths
        grads = torch.ops.aten._flash_attention_backward(
            *(grad, query, key, value, output, logsumexp.contiguous()),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=num_queries,
            max_k=num_keys,
            rng_state=seed,
            unused=offset,
            **ctx.options,
        )
        return *grads, of_sinks, None, None, None
