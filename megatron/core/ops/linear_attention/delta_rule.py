"""Gated delta rule of gated delta-net and of Kimi Delta Attention (KDA), in chunks of positions.

Within a chunk, the corrections ``u_t = beta_t (v_t - k_t S'_t)`` of all positions, where ``S'_t`` is the decayed state,
solve a triangular system: ``(I + A) u = beta (v - k S)`` with ``A_ij = beta_i k_i k_j`` (decayed from j to i) below the
diagonal and the state ``S`` before the chunk. Outputs and the next state are then GEMMs with ``u``. The backward pass
uses that every product of a chunk depends on a sum of logarithms of decays through a row or a column alone: their
gradient is the rows times their gradients minus the columns times theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.ops import runs_on_triton
from megatron.core.ops.linear_attention.chunks import (
    Decays,
    Documents,
    Slab,
    diagonal_of_blocks,
    from_chunks,
    keep_for_backward,
    run_in_chunks,
    slabs,
    start_state_gradients,
    start_states,
    to_chunks,
    unit_lower_inverse,
)
from megatron.core.ops.linear_attention.recurrence import recurrent_gated_delta_rule
from megatron.core.precision import arithmetic_dtype

MAX_KEY_DIM = 256
"""A Triton program keeps the state's rows of all channels of the keys in registers, in at most two blocks."""


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    return_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``q_t S_t`` of the state ``S_t = (I - beta_t k_t k_t^T) exp(log_decay_t) S_{t-1} + beta_t k_t v_t^T``.

    This is the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), or KDA's if every channel of the
    keys has its own decay (Kimi Team 2025, https://arxiv.org/abs/2510.26692). The caller scales ``q`` and normalizes
    ``q`` and ``k``. At a position of ``document_starts`` the preceding state is 0. ``chunk_size`` is a power of two.
    Triton kernels compute it on CUDA if keys have at most 256 channels, not in float64.

    Shapes: ``q, k: [b, s, n, dk], v: [b, s, n, dv], log_decay: [b, s, n] or [b, s, n, dk], beta: [b, s, n],
    initial_state: [b, n, dk, dv], document_starts: [b, s]`` of bool ``-> [b, s, n, dv]`` in the dtype of ``v``, and
    with ``return_state`` the last state ``[b, n, dk, dv]`` in float32 (float64 for float64 input), else None.

    Raises:
        ValueError: ``chunk_size`` is no power of two.
    """
    arguments = q, k, v, log_decay, beta, initial_state, document_starts
    is_on_triton = runs_on_triton(q, k, v, log_decay, beta) and q.shape[-1] <= MAX_KEY_DIM
    chunked = _TritonGatedDeltaRule if is_on_triton else _GatedDeltaRule
    return run_in_chunks(
        chunked, recurrent_gated_delta_rule, *arguments, return_state=return_state, chunk_size=chunk_size
    )


class _TritonGatedDeltaRule(torch.autograd.Function):
    """Chunked form in Triton kernels, which saves its inputs alone: the backward pass computes the states again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.ops.triton import gated_delta_rule_output

        keep_for_backward(ctx, length, initial_state, q, k, v, log_decay, beta, initial_state, document_starts)
        state = None if initial_state is None else initial_state.float()
        return gated_delta_rule_output(q, k, v, log_decay, beta, state, document_starts, length)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, last_state_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        from megatron.core.ops.triton import gated_delta_rule_gradients

        q, k, v, log_decay, beta, initial_state, document_starts = ctx.saved_tensors
        grad = torch.zeros_like(v) if grad is None else grad
        state = None if initial_state is None else initial_state.float()
        *grads, state_grad = gated_delta_rule_gradients(
            grad, last_state_grad, q, k, v, log_decay, beta, state, document_starts, ctx.length
        )
        initial_grad = None if state_grad is None else state_grad.to(ctx.state_dtype)
        return *grads, initial_grad, None, None


class _GatedDeltaRule(torch.autograd.Function):
    """Chunked form, which saves its inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = arithmetic_dtype(q.dtype)
        documents = Documents.of(document_starts, length, wide)
        output = torch.empty_like(v, memory_format=torch.contiguous_format)
        states = start_states(q, length, k.shape[-1], v.shape[-1], wide, initial_state)
        num_positions, num_chunks = q.shape[1], states.shape[2] - 1
        for slab in slabs(q, num_chunks * length * length):
            chunks = _Chunks.of(slab, q, k, v, log_decay, beta, documents, length)
            slab_states = slab.of_states(states)
            slab_output = torch.empty_like(chunks.beta_v)
            for chunk in range(num_chunks):
                state = slab_states[:, :, chunk]
                from_state = chunks.rows_in[:, :, chunk] @ state
                corrections = chunks.inverse[:, :, chunk] @ (chunks.beta_v[:, :, chunk] - from_state[:, :, length:])
                torch.add(
                    from_state[:, :, :length],
                    chunks.attention[:, :, chunk] @ corrections,
                    out=slab_output[:, :, chunk],
                )
                added = chunks.k_out[:, :, chunk].transpose(-1, -2) @ corrections
                slab_states[:, :, chunk + 1] = added.addcmul_(chunks.decays.through[:, :, chunk], state)
            slab.of(output).copy_(from_chunks(slab_output, num_positions))
        keep_for_backward(ctx, length, initial_state, q, k, v, log_decay, beta, document_starts, states)
        return output, states[:, :, -1].clone()

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, last_state_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, log_decay, beta, document_starts, states = ctx.saved_tensors
        length, num_positions, num_chunks = ctx.length, q.shape[1], states.shape[2] - 1
        documents = Documents.of(document_starts, length, states.dtype)
        grad = torch.zeros_like(v) if grad is None else grad
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_decay, beta)]
        state_grad = torch.empty_like(states[:, :, 0])
        for slab in slabs(q, num_chunks * length * length):
            chunks = _Chunks.of(slab, q, k, v, log_decay, beta, documents, length)
            slab_states = slab.of_states(states)
            out_grad = to_chunks(slab.of(grad), length, states.dtype)
            # Gradients of the states after each chunk, then of the state before it.
            state_grads = start_state_gradients(slab_states, slab, last_state_grad)
            rows_grad = torch.cat((out_grad, torch.empty_like(out_grad)), dim=3)
            from_output = chunks.attention.transpose(-1, -2) @ out_grad
            for chunk in reversed(range(num_chunks)):
                after = state_grads[:, :, chunk]
                correction_grad = from_output[:, :, chunk] + chunks.k_out[:, :, chunk] @ after
                rows_grad[:, :, chunk, length:] = -(chunks.inverse[:, :, chunk].transpose(-1, -2) @ correction_grad)
                before = chunks.rows_in[:, :, chunk].transpose(-1, -2) @ rows_grad[:, :, chunk]
                before.addcmul_(chunks.decays.through[:, :, chunk], after)
                if chunk:
                    state_grads[:, :, chunk - 1] = before
                else:
                    slab.of_states(state_grad).copy_(before)
            for result, part in zip(grads, chunks.gradients(slab_states, state_grads, rows_grad)):
                slab.of(result).copy_(from_chunks(part, num_positions))
        initial_grad = None if ctx.state_dtype is None else state_grad.to(ctx.state_dtype)
        return *grads, initial_grad, None, None


@dataclass(frozen=True)
class _Chunks:
    """Tensors of a slab, of which ``rows`` are the queries followed by ``beta k``.

    Shapes, with ``c`` positions per chunk: ``k, k_out: [b, n, chunks, c, dk]``, ``rows, rows_in: [b, n, chunks, 2c,
    dk]``, ``v, beta_v: [b, n, chunks, c, dv]``, ``beta: [b, n, chunks, c, 1]``, ``log_decay: [b, n, chunks, c, 1 or
    dk]``, ``attention, inverse: [b, n, chunks, c, c]``.
    """

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor
    is_per_channel: bool
    decays: Decays
    between: torch.Tensor | None
    rows: torch.Tensor
    rows_in: torch.Tensor
    k_out: torch.Tensor
    beta_v: torch.Tensor
    attention: torch.Tensor
    inverse: torch.Tensor

    @staticmethod
    def of(
        slab: Slab,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        documents: Documents | None,
        length: int,
    ) -> _Chunks:
        wide = arithmetic_dtype(q.dtype)
        q, k, v, log_decay, beta = (to_chunks(slab.of(x), length, wide) for x in (q, k, v, log_decay, beta))
        is_per_channel = log_decay.dim() == q.dim()
        log_decay, beta = log_decay if is_per_channel else log_decay[..., None], beta[..., None]
        decays = Decays.of(log_decay, None if documents is None else documents.part(slab.batch))
        rows = torch.cat((q, beta * k), dim=3)
        if is_per_channel:
            between = None if decays.documents is None else decays.documents.same
            products = _decayed_products(torch.unflatten(rows, 3, (2, length)), k, decays.sums)
        else:
            between = decays.between()
            products = torch.unflatten(rows @ k.transpose(-1, -2), 3, (2, length))
        if between is not None:
            products *= between[:, :, :, None]
        enter = decays.enter[:, :, :, None]
        return _Chunks(
            k=k,
            v=v,
            beta=beta,
            log_decay=log_decay,
            is_per_channel=is_per_channel,
            decays=decays,
            between=between,
            rows=rows,
            rows_in=(torch.unflatten(rows, 3, (2, length)) * enter).flatten(3, 4),
            k_out=k * decays.leave,
            beta_v=beta * v,
            attention=products[:, :, :, 0],
            inverse=unit_lower_inverse(products[:, :, :, 1]),
        )

    def gradients(
        self, states: torch.Tensor, state_grads: torch.Tensor, output_grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, log_decay and beta.

        ``output_grads`` are the gradients of ``rows_in`` times the states: of the outputs, and of ``beta k`` times the
        decayed states.

        Shapes: ``states: [b, n, chunks + 1, dk, dv]``, ``state_grads: [b, n, chunks, dk, dv]`` after each chunk,
        ``output_grads: [b, n, chunks, 2c, dv]``.
        """
        length = self.k.shape[3]
        corrections = self.inverse @ (self.beta_v - self.rows_in[:, :, :, length:] @ states[:, :, :-1])
        products_grad = output_grads @ corrections.transpose(-1, -2)
        both = torch.unflatten(products_grad, 3, (2, length))
        if self.between is not None:
            both *= self.between[:, :, :, None]
        # A position's own key is no part of the triangular system.
        both[:, :, :, 1].diagonal(dim1=-2, dim2=-1).zero_()
        rows = torch.unflatten(self.rows, 3, (2, length))
        if self.is_per_channel:
            rows_grad, k_grad = _decayed_products_grads(both, rows, self.k, self.decays.sums)
        else:
            rows_grad = torch.unflatten(products_grad @ self.k, 3, (2, length))
            k_grad = products_grad.transpose(-1, -2) @ self.rows
        rows_in_grad = torch.unflatten(output_grads @ states[:, :, :-1].transpose(-1, -2), 3, (2, length))
        rows_grad.addcmul_(rows_in_grad, self.decays.enter[:, :, :, None])
        k_grad.addcmul_(corrections @ state_grads.transpose(-1, -2), self.decays.leave)
        q_grad, beta_k_grad = rows_grad.unbind(dim=3)
        sums_grad = (rows * rows_grad).sum(dim=3) - self.k * k_grad
        last_grad = (states[:, :, 1:] * state_grads).sum(dim=-1)
        if not self.is_per_channel:
            sums_grad, last_grad = sums_grad.sum(dim=-1, keepdim=True), last_grad.sum(dim=-1, keepdim=True)
        sums_grad[:, :, :, -1] += last_grad
        log_decay_grad = self.decays.log_decay_grad(self.log_decay, sums_grad)
        beta_v_grad = -output_grads[:, :, :, length:]
        beta_grad = (beta_k_grad * self.k).sum(dim=-1) + (beta_v_grad * self.v).sum(dim=-1)
        k_grad.addcmul_(self.beta, beta_k_grad)
        log_decay_grad = log_decay_grad if self.is_per_channel else log_decay_grad.squeeze(-1)
        return q_grad, k_grad, self.beta * beta_v_grad, log_decay_grad, beta_grad


def _decayed_products(rows: torch.Tensor, columns: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the products of rows with columns whose channels decay in between; columns after the row give 0.

    The chunk is halved again and again. The rows of the later half meet the columns of the earlier half in one GEMM:
    both decay from or to the position between the halves, so that no exponent is positive.

    Shapes: ``rows: [..., 2, c, d]``, ``columns, sums: [..., c, d]`` ``-> [..., 2, c, c]``.
    """
    length = columns.shape[-2]
    products = rows.new_zeros(*rows.shape[:-1], length)
    products.diagonal(dim1=-2, dim2=-1).copy_((rows * columns.unsqueeze(-3)).sum(dim=-1))
    half = length // 2
    while half:
        row_decay, column_decay = _decays_of_halves(sums, half)
        later = _halves(rows, half)[1] * row_decay.unsqueeze(-4)
        earlier = _halves(columns, half)[0] * column_decay
        blocks = later @ earlier.unsqueeze(-4).transpose(-1, -2)
        diagonal_of_blocks(products, 2 * half)[..., half:, :half] = blocks
        half //= 2
    return products


def _decayed_products_grads(
    grad: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows and columns of `_decayed_products`, given the gradient of its result."""
    own = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    rows_grad = own * columns.unsqueeze(-3)
    columns_grad = (own * rows).sum(dim=-3)
    half = columns.shape[-2] // 2
    while half:
        row_decay, column_decay = _decays_of_halves(sums, half)
        later = _halves(rows, half)[1] * row_decay.unsqueeze(-4)
        earlier = _halves(columns, half)[0] * column_decay
        blocks = diagonal_of_blocks(grad, 2 * half)[..., half:, :half]
        _halves(rows_grad, half)[1].addcmul_(row_decay.unsqueeze(-4), blocks @ earlier.unsqueeze(-4))
        _halves(columns_grad, half)[0].addcmul_(column_decay, (blocks.transpose(-1, -2) @ later).sum(dim=-4))
        half //= 2
    return rows_grad, columns_grad


def _halves(x: torch.Tensor, half: int) -> tuple[torch.Tensor, ...]:
    """Return views of the earlier and the later half of every two halves.

    Shapes: ``[..., c, d] ->`` twice ``[..., c / (2 half), half, d]``.
    """
    return torch.unflatten(x, -2, (-1, 2, half)).unbind(dim=-3)


def _decays_of_halves(sums: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decays from the end of each earlier half to the rows of the later one, and from its columns to it."""
    earlier, later = _halves(sums, half)
    end = earlier[..., -1:, :]
    return (later - end).exp_(), (end - earlier).exp_()
