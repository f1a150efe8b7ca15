"""Depthwise causal convolution over positions, as one multiplication per weight and position.

The backward pass computes the convolution again for SiLU, so that only the input is saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.ops import runs_on_triton
from megatron.core.precision import arithmetic_dtype

_PART_ELEMENTS = 1 << 17
_CUDA_PART_ELEMENTS = 1 << 28


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    silu: bool = False,
    return_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel over the last ``width`` positions, add the bias, and apply SiLU if requested.

    The last weight of a channel multiplies the current position. The state is the preceding ``width - 1`` inputs, in
    order. Inputs before a position of ``document_starts`` count as 0 from there on, also in the returned state.

    Shapes: ``x: [b, s, c], weight: [c, width], bias: [c], initial_state: [b, width - 1, c], document_starts: [b, s]``
    of bool ``-> [b, s, c]`` in the dtype of ``x``, and with ``return_state`` the last state ``[b, width - 1, c]`` in
    float32 (float64 for float64 input), else None.
    """
    output, state = _CausalConvolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, initial_state, document_starts, silu
    )
    return output, state if return_state else None


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        silu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight, bias, initial_state, document_starts)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        windows = _Windows(x, weight, bias, initial_state, document_starts)
        if runs_on_triton(x):
            from megatron.core.ops.triton import convolve

            output = convolve(x, windows.weight, windows.bias, windows.state, windows.visible, silu)
        else:
            output = torch.empty_like(x, memory_format=torch.contiguous_format)
            for part in windows.parts():
                result = windows.convolve(part)
                output[:, part.start : part.stop] = F.silu(result, inplace=True) if silu else result
        end = x.shape[1]
        state = [windows.seen(range(end, end + 1), shift) for shift in range(windows.width - 1)]
        return output, torch.cat(state, dim=1) if state else windows.state

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, last_state_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, initial_state, document_starts = ctx.saved_tensors
        windows = _Windows(x, weight, bias, initial_state, document_starts)
        grad = torch.zeros_like(x) if grad is None else grad
        if runs_on_triton(x, grad):
            from megatron.core.ops.triton import convolution_gradients

            x_grad, weight_grad, bias_grad, state_grad = convolution_gradients(
                grad, last_state_grad, x, windows.weight, windows.bias, windows.state, windows.visible, ctx.silu
            )
        else:
            x_grad, weight_grad, bias_grad, state_grad = windows.gradients(grad, last_state_grad, ctx.silu)
        return (
            x_grad.to(x.dtype),
            weight_grad.t().to(weight.dtype),
            None if bias is None else bias_grad.to(bias.dtype),
            None if initial_state is None else state_grad.to(initial_state.dtype),
            None,
            None,
        )


class _Windows:
    """The inputs that each position sees, which are ``width - 1 - shift`` positions before it.

    Parts of the positions are processed one after the other, so that temporary tensors fit into a cache of the CPU.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        document_starts: torch.Tensor | None,
    ) -> None:
        wide = arithmetic_dtype(x.dtype)
        self.width = weight.shape[1]
        self.weight = weight.to(wide).t().contiguous()
        self.bias = None if bias is None else bias.to(wide)
        self.x = x
        self.state = (
            x.new_zeros(x.shape[0], self.width - 1, x.shape[2], dtype=wide)
            if initial_state is None
            else initial_state.to(wide).contiguous()
        )
        self.visible = None if document_starts is None else _visible(document_starts, self.width, wide)

    def parts(self) -> list[range]:
        """Return the parts of the positions, no shorter than a window."""
        batch, num_positions, channels = self.x.shape
        limit = _CUDA_PART_ELEMENTS if self.x.is_cuda else _PART_ELEMENTS
        size = max(self.width, limit // max(1, batch * channels))
        return [range(start, min(start + size, num_positions)) for start in range(0, num_positions, size)]

    def convolve(self, part: range) -> torch.Tensor:
        """Return the convolution at some positions, with the bias."""
        result = self.seen(part, self.width - 1) * self.weight[-1]
        for shift in range(self.width - 1):
            result.addcmul_(self.seen(part, shift), self.weight[shift])
        return result if self.bias is None else result.add_(self.bias)

    def seen(self, part: range, shift: int) -> torch.Tensor:
        """Return the inputs that some positions see at one place of their windows, 0 for other documents.

        The position after the last one is allowed too: its window contains the last state.
        """
        offset = self.width - 1 - shift
        first, last = part.start - offset, part.stop - offset
        inputs = self.x[:, max(0, first) : max(0, last)].to(self.state.dtype)
        if first < 0:
            inputs = torch.cat((self.state[:, part.start + shift : part.stop + shift], inputs), dim=1)
        return self.mask(inputs, part, shift)

    def mask(self, x: torch.Tensor, part: range, shift: int) -> torch.Tensor:
        """Return ``x``, but 0 where the input of a window is from an earlier document than its position."""
        if self.visible is None or shift == self.width - 1:
            return x
        return x * self.visible[shift, :, part.start : part.stop]

    def gradients(
        self, grad: torch.Tensor, last_state_grad: torch.Tensor | None, silu: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of the inputs, the transposed weight, the bias and the state."""
        batch, num_positions, channels = self.x.shape
        before = self.width - 1
        # With the positions of the state.
        inputs_grad = self.state.new_zeros(batch, before + num_positions, channels)
        weight_grad, bias_grad = torch.zeros_like(self.weight), inputs_grad.new_zeros(channels)
        for part in self.parts():
            part_grad = grad[:, part.start : part.stop].to(self.state.dtype)
            if silu:
                result = self.convolve(part)
                share = torch.sigmoid(result)
                part_grad = part_grad * share * (1.0 + result * (1.0 - share))
            bias_grad += part_grad.sum(dim=(0, 1))
            for shift in range(self.width):
                weight_grad[shift] += (part_grad * self.seen(part, shift)).flatten(0, 1).sum(dim=0)
                inputs = inputs_grad[:, part.start + shift : part.stop + shift]
                inputs.addcmul_(self.mask(part_grad, part, shift), self.weight[shift])
        if last_state_grad is not None:
            end = range(num_positions, num_positions + 1)
            for shift in range(before):
                inputs = inputs_grad[:, num_positions + shift : num_positions + shift + 1]
                inputs += self.mask(last_state_grad[:, shift : shift + 1], end, shift)
        return inputs_grad[:, before:], weight_grad, bias_grad, inputs_grad[:, :before]


def _visible(document_starts: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 where a position, or the one after the last, sees the input at each earlier place of its window.

    Shapes: ``[b, s] -> [width - 1, b, s + 1, 1]``.
    """
    starts = F.pad(document_starts, (width - 1, 1))
    batch, num_positions = document_starts.shape
    visible = torch.ones(width - 1, batch, num_positions + 1, 1, dtype=dtype, device=starts.device)
    hidden = torch.zeros_like(starts[:, width - 1 :])
    for shift in reversed(range(width - 1)):
        # The next later place of the window is at these positions.
        hidden = hidden | starts[:, shift + 1 : shift + 2 + num_positions]
        visible[shift, :, :, 0] = (~hidden).to(dtype)
    return visible
