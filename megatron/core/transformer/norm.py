"""LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.kernels.transformer_engine import EngineNorm, transformer_engine_for
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.layers import make_parameter, replicated_spec


class Norm(nn.Module):
    """Normalise the last dim in at least float32 and scale it.

    ``partial_gradient`` says that a tensor-parallel rank sees only part of the positions or heads, so that the
    gradients of its copy must be summed. With ``centred_weight`` the weight is stored as its difference from one.
    ``transformer_impl`` may name a library that computes it where there is one.

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
        transformer_impl: str = "local",
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
        engine = transformer_engine_for(transformer_impl, device)
        self.of_engine: EngineNorm | None = None
        if engine is not None:
            self.of_engine = engine.make_norm(kind, width, epsilon, centred_weight=centred_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised input in its own dtype."""
        return self._normalise(x)

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_engine is not None and self.of_engine.takes(x, self.weight):
            return self.of_engine(x, self.weight, self.bias)
        weight = self.weight + 1 if self.centred_weight else self.weight
        return self.compute(x, weight, self.bias, self.kind, self.epsilon)


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, epsilon: float
) -> torch.Tensor:
    """Return the normalised input in its own dtype. Shapes: ``x: [..., n]``, ``weight, bias: [n] -> [..., n]``."""
    if kind == "LayerNorm":
        # torch's kernel accumulates low precisions in float32.
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    assert kind == "RMSNorm", kind
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    # On the CPU torch's own is made of the same operations; here its accumulation in float32 is explicit.
    wide = x.to(arithmetic_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight
