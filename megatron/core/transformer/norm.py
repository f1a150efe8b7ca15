"""LayerNorm and RMSNorm, RMSNorm across all heads of a token, and the norm of the residual stream.

LayerNorm: Ba et al. 2016, https://arxiv.org/abs/1607.06450. RMSNorm: Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467. The residual classes add a branch to the residual stream and normalize the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.ops import EngineNorm, RowKeys, drop_hidden, runs_on_triton, transformer_engine_for
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_shards
from megatron.core.tensor_parallel import make_parameter, replicated_spec, sum_over_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(nn.Module):
    """Normalize the last dim in at least float32 and scale it.

    ``partial_gradient`` says that a tensor-parallel rank sees only part of the positions or heads, so that the
    gradients of its copy must be summed. With ``centered_weight`` the weight is stored as its difference from one.
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
        centered_weight: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        transformer_impl: str = "local",
    ) -> None:
        super().__init__()
        self.kind = kind
        self.shape = (width,)
        self.epsilon = epsilon
        self.centered_weight = centered_weight
        self.compute = normalize
        mean = 0.0 if centered_weight else 1.0
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
            self.of_engine = engine.make_norm(kind, width, epsilon, centered_weight=centered_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_engine is not None and self.of_engine.takes(x, self.weight):
            return self.of_engine(x, self.weight, self.bias)
        weight = self.weight + 1 if self.centered_weight else self.weight
        return self.compute(x, weight, self.bias, self.kind, self.epsilon)


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, epsilon: float
) -> torch.Tensor:
    """Return the normalized input in its own dtype. Shapes: ``x: [..., n]``, ``weight, bias: [n] -> [..., n]``."""
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


class AcrossHeadsNorm(nn.Module):
    """Normalize the heads of each token as one vector, and scale every channel by a weight of its own.

    Where there are fewer heads than tensor-parallel ranks, several ranks hold copies of one. Forward and backward: an
    all-reduce of one number a token.

    Shapes: ``[s, b, heads/tp, d] -> [s, b, heads/tp, d]``.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.epsilon = config.norm_epsilon
        self.mean_weight = 1.0 if config.apply_layernorm_1p else 0.0
        num_shards = min(num_heads, tp.size)
        self.copies = tp.size // num_shards
        shard, member = divmod(tp.rank, self.copies)
        self.width = num_heads * config.kv_channels
        spec = ParamSpec(
            "weight",
            (self.width,),
            even_shards((self.width,), 0, shard, num_shards),
            gradient_sum_axes=("tp",) if self.copies > 1 else (),
            replica_index=member,
            num_replicas=self.copies,
            init_mean=1.0 - self.mean_weight,
        )
        dtype = dtype_from_name(config.params_dtype)
        self.weight = make_parameter((self.width // num_shards,), spec, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads in their own dtype."""
        wide = x.to(arithmetic_dtype(x.dtype))
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        mean = sum_over_tensor_model_parallel_region(squares, self.tp) / (self.copies * self.width)
        normalized = (wide * torch.rsqrt(mean + self.epsilon)).to(x.dtype)
        return normalized * (self.weight + self.mean_weight).view(x.shape[-2:])


def add_branch(x: torch.Tensor, branch: torch.Tensor | None, keys: RowKeys | None, probability: float) -> torch.Tensor:
    """Return the residual stream ``x`` with a branch added, of which dropout by ``keys`` leaves a part.

    Without keys nothing is dropped, without a branch the stream is returned.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]``.
    """
    if branch is None:
        return x
    return x + branch if keys is None else drop_hidden(branch, keys, probability, x)


@dataclass
class NormAhead:
    """Hand a layer the norm that it begins with, from the end of the layer before, which has a branch to add there.

    ``following`` is with what the next layer reads the stream, and ``normalized`` what came of it; both are None where
    there is no layer behind, or before.
    """

    following: ResidualNorm | ResidualSum | None = None
    normalized: torch.Tensor | None = None


class ResidualSum(nn.Module):
    """Add a branch to the residual stream, which is read without a norm. Called as `ResidualNorm` is."""

    def forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream twice."""
        total = add_branch(x, branch, keys, probability)
        return total, total


class ResidualNorm(Norm):
    """Add a branch to the residual stream, and normalize the sum.

    ``sums_branch_grad`` says that branches end with a bias, which wants the sum of their gradient.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]`` twice.
    """

    sums_branch_grad = False

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream, to be read further in place of ``x``, and its norm.

        Triton does all of it in one pass, and in one the gradients of both results.
        """
        tensors = (x, self.weight) if branch is None else (x, self.weight, branch)
        is_alike = all(tensor.dtype == x.dtype for tensor in tensors) and self.kind in ("LayerNorm", "RMSNorm")
        if is_alike and runs_on_triton(*tensors):
            from megatron.core.ops.triton import MAX_WIDTH, add_and_normalize

            if self.shape[0] <= MAX_WIDTH:
                return add_and_normalize(
                    x,
                    branch,
                    self.weight,
                    self.bias,
                    self.epsilon,
                    subtracts_mean=self.kind == "LayerNorm",
                    weight_offset=1.0 if self.centered_weight else 0.0,
                    keys=keys,
                    probability=probability,
                    sums_branch_grad=self.sums_branch_grad,
                )
        total = add_branch(x, branch, keys, probability)
        return total, self._normalize(total)

    def of_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the stream that a call has left: the same bits as the call's."""
        normalized: torch.Tensor = self(x)[1]
        return normalized


class PostNormResidual(ResidualNorm):
    """Add a branch to the residual stream and normalize the sum, which is the stream from here on."""

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm twice."""
        _, normalized = super().forward(x, branch, keys, probability)
        return normalized, normalized
