"""Depthwise causal convolution over positions."""

from __future__ import annotations

import torch

from megatron.core.ops.linear_attention.recurrence import recurrent_causal_convolution


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
    return recurrent_causal_convolution(
        x, weight, bias, initial_state, document_starts, silu=silu, return_state=return_state
    )
