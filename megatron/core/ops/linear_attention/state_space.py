"""Selective scan of Mamba-2 in chunks of positions.

Within a chunk it is attention without softmax, with a decay between positions. The states between chunks are GEMMs over
all heads of a group at once, because these heads share ``B`` and ``C``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.ops import runs_on_triton
from megatron.core.ops.linear_attention.chunks import (
    MAX_HEAD_DIM,
    Decays,
    Documents,
    Slab,
    from_chunks,
    keep_for_backward,
    run_in_chunks,
    slabs,
    start_state_gradients,
    start_states,
    to_chunks,
)
from megatron.core.ops.linear_attention.recurrence import recurrent_selective_scan
from megatron.core.precision import arithmetic_dtype


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    return_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``S_t C_t + D x_t`` of the state ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``.

    This is the state-space layer of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060). ``dt`` is positive:
    the caller adds its bias and applies softplus. ``A`` is negative. Consecutive heads share the ``B`` and ``C`` of a
    group. At a position of ``document_starts`` the preceding state is 0. ``chunk_size`` is a power of two.

    Shapes: ``x: [b, s, n, d], dt: [b, s, n], A, D: [n], B, C: [b, s, g, d_state], initial_state: [b, n, d, d_state],
    document_starts: [b, s]`` of bool ``-> [b, s, n, d]`` in the dtype of ``x``, and with ``return_state`` the last
    state ``[b, n, d, d_state]`` in float32 (float64 for float64 input), else None.

    Raises:
        ValueError: ``chunk_size`` is no power of two.
    """
    arguments = x, dt, A, B, C, D, initial_state, document_starts
    is_on_triton = runs_on_triton(x, dt, A, B, C) and x.shape[-1] <= MAX_HEAD_DIM
    chunked = _TritonSelectiveScan if is_on_triton else _SelectiveScan
    return run_in_chunks(
        chunked, recurrent_selective_scan, *arguments, return_state=return_state, chunk_size=chunk_size
    )


class _TritonSelectiveScan(torch.autograd.Function):
    """Chunked form in Triton kernels, which saves its inputs: the backward pass computes the states again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.ops.triton import scan_chunks

        arguments = x, dt, A, B, C, D, initial_state, document_starts
        keep_for_backward(ctx, length, initial_state, *arguments)
        return scan_chunks(*arguments, length)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, last_state_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        from megatron.core.ops.triton import scan_gradients

        x, dt, A, B, C, D, initial_state, document_starts = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        inputs = x, dt, A, B, C, D, initial_state, document_starts
        return *scan_gradients(grad, last_state_grad, *inputs, ctx.length), None, None


class _SelectiveScan(torch.autograd.Function):
    """Chunked form, which saves its inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = arithmetic_dtype(x.dtype)
        documents = Documents.of(document_starts, length, wide)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        transposed = None if initial_state is None else initial_state.transpose(-1, -2)
        states = start_states(x, length, B.shape[-1], x.shape[-1], wide, transposed)
        num_positions, heads, num_chunks = x.shape[1], x.shape[2], states.shape[2] - 1
        for slab in slabs(x, num_chunks * length * length, heads // B.shape[2]):
            chunks = _Chunks.of(slab, x, dt, A, B, C, documents, length)
            slab_states = slab.of_states(states)
            added = chunks.to_heads(
                chunks.split(chunks.B.transpose(-1, -2) @ (chunks.steps * chunks.leave).flatten(-2))
            )
            for chunk in range(num_chunks):
                torch.addcmul(
                    added[:, :, chunk],
                    chunks.decays.through[:, :, chunk],
                    slab_states[:, :, chunk],
                    out=slab_states[:, :, chunk + 1],
                )
            slab_output = chunks.from_states(slab_states[:, :, :-1]) * chunks.enter
            slab_output += chunks.to_groups(chunks.attention @ chunks.to_heads(chunks.steps))
            if D is not None:
                slab_output.addcmul_(chunks.of_heads(D, slab), chunks.x)
            slab.of(output).copy_(from_chunks(slab_output, num_positions).flatten(2, 3))
        keep_for_backward(ctx, length, initial_state, x, dt, A, B, C, D, document_starts, states)
        return output, states[:, :, -1].transpose(-1, -2).contiguous()

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, last_state_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, dt, A, B, C, D, document_starts, states = ctx.saved_tensors
        length, num_positions, num_chunks = ctx.length, x.shape[1], states.shape[2] - 1
        documents = Documents.of(document_starts, length, states.dtype)
        grad = torch.zeros_like(x) if grad is None else grad
        x_grad, dt_grad = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, dt))
        A_grad, D_grad = (states.new_zeros(A.shape) for _ in range(2))
        B_grad, C_grad = (states.new_zeros(B.shape) for _ in range(2))
        state_grad = torch.empty_like(states[:, :, 0])
        last_grad = None if last_state_grad is None else last_state_grad.transpose(-1, -2)
        for slab in slabs(x, num_chunks * length * length, x.shape[2] // B.shape[2]):
            chunks = _Chunks.of(slab, x, dt, A, B, C, documents, length)
            slab_states = slab.of_states(states)
            out_grad = _cut(slab.of(grad), chunks.x.shape[1], length, states.dtype)
            entered_grad = out_grad * chunks.enter
            # Gradients of the states after each chunk; first of the state before it, by the outputs of the chunk.
            from_output = chunks.to_heads(chunks.split(chunks.C.transpose(-1, -2) @ entered_grad.flatten(-2)))
            state_grads = start_state_gradients(slab_states, slab, last_grad)
            for chunk in reversed(range(num_chunks)):
                before = state_grads[:, :, chunk - 1] if chunk else slab.of_states(state_grad)
                before.copy_(from_output[:, :, chunk])
                before.addcmul_(chunks.decays.through[:, :, chunk], state_grads[:, :, chunk])
            after = chunks.to_groups(state_grads).flatten(-2)
            before = chunks.to_groups(slab_states[:, :, :-1]).flatten(-2)
            steps_grad = chunks.split(chunks.B @ after) * chunks.leave
            head_grad = chunks.to_heads(out_grad)
            steps_grad += chunks.to_groups(chunks.attention.transpose(-1, -2) @ head_grad)
            attention_grad = head_grad @ chunks.to_heads(chunks.steps).transpose(-1, -2)
            attention_grad *= chunks.between
            by_group = chunks.by_group(attention_grad)
            products_grad = by_group.sum(dim=2)
            sums_grad = (by_group * chunks.products[:, :, None]).sum(dim=-1, keepdim=True).flatten(1, 2)
            sums_grad += chunks.to_heads(
                (chunks.from_states(slab_states[:, :, :-1]) * entered_grad).sum(dim=-1, keepdim=True)
            )
            sums_grad -= chunks.to_heads((chunks.steps * steps_grad).sum(dim=-1, keepdim=True))
            sums_grad[:, :, :, -1] += (slab_states[:, :, 1:] * state_grads).sum(dim=(-2, -1))[..., None]
            log_decay_grad = chunks.decays.log_decay_grad(chunks.log_decay, sums_grad)
            A_grad[slab.heads] += (log_decay_grad * chunks.dt).sum(dim=(0, 2, 3, 4))
            slab_dt_grad = log_decay_grad * A[slab.heads, None, None, None].to(states.dtype)
            slab_dt_grad += chunks.to_heads((chunks.x * steps_grad).sum(dim=-1, keepdim=True))
            slab.of(dt_grad).copy_(from_chunks(slab_dt_grad.squeeze(-1), num_positions))
            steps_grad *= chunks.to_groups(chunks.dt)
            if D is not None:
                D_grad[slab.heads] += (out_grad * chunks.x).sum(dim=(0, 2, 3, 5)).flatten()
                steps_grad.addcmul_(chunks.of_heads(D, slab), out_grad)
            slab.of(x_grad).copy_(from_chunks(steps_grad, num_positions).flatten(2, 3))
            slab_B_grad = (chunks.steps * chunks.leave).flatten(-2) @ after.transpose(-1, -2)
            slab_B_grad += products_grad.transpose(-1, -2) @ chunks.C
            slab_C_grad = entered_grad.flatten(-2) @ before.transpose(-1, -2) + products_grad @ chunks.B
            for result, part in ((B_grad, slab_B_grad), (C_grad, slab_C_grad)):
                chunks.groups.of(result).add_(from_chunks(part, num_positions))
        initial_grad = None if ctx.state_dtype is None else state_grad.transpose(-1, -2).to(ctx.state_dtype)
        D_result = None if D is None else D_grad.to(D.dtype)
        narrow = A_grad.to(A.dtype), B_grad.to(B.dtype), C_grad.to(C.dtype), D_result
        return x_grad, dt_grad, *narrow, initial_grad, None, None


@dataclass(frozen=True)
class _Chunks:
    """Tensors of a slab of ``n`` heads in ``g`` groups of ``m``; ``steps`` are ``dt x``.

    Shapes, with ``c`` positions per chunk: ``x, steps: [b, g, chunks, c, m, d]``, ``enter, leave: [b, g, chunks, c, m,
    1]``, ``dt, log_decay: [b, n, chunks, c, 1]``, ``B, C: [b, g, chunks, c, d_state]``, ``products: [b, g, chunks, c,
    c]``, ``between, attention: [b, n, chunks, c, c]``.
    """

    groups: Slab
    x: torch.Tensor
    steps: torch.Tensor
    dt: torch.Tensor
    log_decay: torch.Tensor
    decays: Decays
    enter: torch.Tensor
    leave: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    products: torch.Tensor
    between: torch.Tensor
    attention: torch.Tensor

    @staticmethod
    def of(
        slab: Slab,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        documents: Documents | None,
        length: int,
    ) -> _Chunks:
        wide = arithmetic_dtype(x.dtype)
        heads_per_group = x.shape[2] // B.shape[2]
        first, last = slab.heads.start // heads_per_group, (slab.heads.stop - 1) // heads_per_group
        groups = Slab(slab.batch, slice(first, last + 1))
        num_groups = last + 1 - first
        x = _cut(slab.of(x), num_groups, length, wide)
        dt = to_chunks(slab.of(dt), length, wide)[..., None]
        B, C = (to_chunks(groups.of(y), length, wide) for y in (B, C))
        log_decay = dt * A[slab.heads, None, None, None].to(wide)
        decays = Decays.of(log_decay, None if documents is None else documents.part(slab.batch))
        between = decays.between()
        products = C @ B.transpose(-1, -2)
        attention = (torch.unflatten(between, 1, (num_groups, -1)) * products[:, :, None]).flatten(1, 2)
        enter, leave, steps = (_to_groups(y, num_groups) for y in (decays.enter, decays.leave, dt))
        return _Chunks(groups, x, steps * x, dt, log_decay, decays, enter, leave, B, C, products, between, attention)

    def from_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``C`` times the states before each chunk.

        Shapes: ``[b, n, chunks, d_state, d] -> [b, g, chunks, c, m, d]``.
        """
        return self.split(self.C @ self.to_groups(states).flatten(-2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[..., m d] -> [..., m, d]``."""
        return torch.unflatten(x, -1, self.x.shape[-2:])

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, n, ...] -> [b, g, m, ...]``."""
        return torch.unflatten(x, 1, (self.x.shape[1], -1))

    def to_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, n, chunks, c, d] -> [b, g, chunks, c, m, d]``."""
        return _to_groups(x, self.x.shape[1])

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, g, chunks, c, m, d] -> [b, n, chunks, c, d]``."""
        return x.movedim(4, 2).flatten(1, 2)

    def of_heads(self, x: torch.Tensor, slab: Slab) -> torch.Tensor:
        """Return a number per head, broadcast over the rest of ``x``.

        Shapes: ``[all heads] -> [g, 1, 1, m, 1]``.
        """
        return x[slab.heads].to(self.x.dtype).view(self.x.shape[1], 1, 1, -1, 1)


def _cut(x: torch.Tensor, num_groups: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Shapes: ``[b, s, n, d] -> [b, g, chunks, c, m, d]``."""
    return to_chunks(torch.unflatten(x, 2, (num_groups, -1)), length, dtype)


def _to_groups(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    return torch.unflatten(x, 1, (num_groups, -1)).movedim(2, 4)
