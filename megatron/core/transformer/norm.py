"""LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.kernels.triton_choice import runs_on_triton
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.layers import make_parameter, replicated_spec


class Norm(nn.Module):
    """Normalise the last dim in at least float32 and scale it.

    ``partial_gradient`` says that a tensor-parallel rank sees only part of the positions or heads, so that the
    gradients of its copy must be summed. With ``centred_weight`` the weight is stored as its difference from one.

    Shapes: ``[..., n] -> [..., n]``.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        epsilon: float,
        tp: Group,
        *,
        partial_gradient: bool,
        centred_weight: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.shape = (width,)
        self.epsilon = epsilon
        self.centred_weight = centred_weight
        self.compute = normalise
        mean = 0.0 if centred_weight else 1.0
        self.weight = make_parameter(
            self.shape, replicated_spec("weight", self.shape, tp, partial_gradient, mean=mean), dtype, device
        )
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            self.bias = make_parameter(
                self.shape, replicated_spec("bias", self.shape, tp, partial_gradient), dtype, device
            )

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(self, x: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised input in its own dtype; with a ``branch`` return ``x + branch`` and its norm."""
        if branch is None:
            return self._normalise(x)
        is_alike = x.dtype == branch.dtype == self.weight.dtype and self.kind in ("LayerNorm", "RMSNorm")
        if is_alike and runs_on_triton(x, branch, self.weight):
            from megatron.core.kernels.triton_programs import residual_norm as programs

            if self.shape[0] <= programs.MAX_WIDTH:
                return programs.add_and_normalise(
                    branch,
                    x,
                    self.weight,
                    self.bias,
                    self.epsilon,
                    subtracts_mean=self.kind == "LayerNorm",
                    weight_offset=1.0 if self.centred_weight else 0.0,
                )
        total = x + branch
        return total, self._normalise(total)

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.centred_weight else self.weight
        return self.compute(x, weight, self.bias, self.kind, self.epsilon)


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, epsilon: float
) -> torch.Tensor:
    """Return the normalised input in its own dtype. Shapes: ``x: [..., n]``, ``weight, bias: [n] -> [..., n]``."""
    if kind == "LayerNorm":
        # torch's kernel accumulates low precisions in float32.
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    # On the CPU torch's own is made of the same operations; here its accumulation in float32 is explicit.
    wide = x.to(arithmetic_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight
