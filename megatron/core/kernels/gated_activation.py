"""Gated activations (SwiGLU and GeGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.kernels.triton_choice import runs_on_triton


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the activation of the first half of the channels times the second half.

    ``kind`` is swiglu or geglu, whose GELU is the approximation by tanh.

    Shapes: ``[..., 2f] -> [..., f]``.
    """
    if runs_on_triton(x):
        from megatron.core.kernels.triton_programs import gated_activation as programs

        return programs.gated_activation(x, kind)
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * up
