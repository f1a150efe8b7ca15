"""LayerNorm and RMSNorm, RMSNorm across all heads of a token, and norms fused with the residual addition.

LayerNorm: Ba et al. 2016, https://arxiv.org/abs/1607.06450. RMSNorm: Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467. The residual classes add a branch to the residual stream and normalize the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor

from megatron.core.errors import ConfigurationError
from megatron.core.ops import EngineNorm, RowKeys, drop_hidden, runs_on_triton, transformer_engine_for
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.registry import find_registered, is_registered
from megatron.core.sharding import ParamSpec, even_shards
from megatron.core.tensor_parallel import make_parameter, replicated_spec, sum_over_tensor_model_parallel_region
from megatron.core.transformer.decoder_config import DecoderConfig


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim, computed in at least float32.

    ``partial_gradient`` means that a tensor-parallel rank sees only part of the positions or heads, so that the
    weight's gradients must be summed over the ranks. With ``centered_weight`` the weight is stored as its difference
    from one. ``parameters`` are the learned ones of ``weight`` and ``bias``. ``transformer_impl`` selects the library
    that computes the norm, if that library is available. If the kind was registered by a script, ``module`` computes
    the norm and has the parameters.

    Shapes: ``[..., n] -> [..., n]``.
    """

    weight: nn.Parameter | None

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
        parameters: Sequence[str] = ("weight", "bias"),
    ) -> None:
        super().__init__()
        self.kind = kind
        self.shape = (width,)
        self.epsilon = epsilon
        self.centered_weight = centered_weight
        self.compute = normalize
        self.weight = None
        self.bias: nn.Parameter | None = None
        self.module: nn.Module | None = None
        self.compiled_module: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.of_engine: EngineNorm | None = None
        if is_registered("normalization", kind):
            self.module = _registered_norm(kind, width, epsilon, tp, partial_gradient, dtype, device)
            return
        mean = 0.0 if centered_weight else 1.0
        if "weight" in parameters:
            self.weight = make_parameter(
                self.shape, replicated_spec("weight", self.shape, tp, partial_gradient, mean=mean), dtype, device
            )
        has_all = kind != "LayerNorm" or "bias" in parameters
        if kind == "LayerNorm" and has_all:
            self.bias = make_parameter(
                self.shape, replicated_spec("bias", self.shape, tp, partial_gradient), dtype, device
            )
        engine = transformer_engine_for(transformer_impl, device)
        if engine is not None and has_all and self.weight is not None:
            self.of_engine = engine.make_norm(kind, width, epsilon, centered_weight=centered_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        if self.module is not None:
            normalized: torch.Tensor = (self.compiled_module or self.module)(x)
            return normalized.to(x.dtype)
        if self.of_engine is not None and self.weight is not None and self.of_engine.takes(x, self.weight):
            return self.of_engine(x, self.weight, self.bias)
        return self.compute(x, self._whole_weight(), self.bias, self.kind, self.epsilon)

    def _whole_weight(self) -> torch.Tensor | None:
        return self.weight + 1 if self.centered_weight and self.weight is not None else self.weight


def make_norm(
    config: DecoderConfig,
    tp: Group,
    device: torch.device | str,
    kind: type[Norm] = Norm,
    *,
    partial_gradient: bool | None = None,
    parameters: Sequence[str] | None = None,
) -> Norm:
    """Return the configured normalization of hidden states.

    By default gradients are partial with sequence parallelism, and ``parameters`` are the configured ones.
    """
    return kind(
        config.normalization,
        config.hidden_size,
        config.norm_epsilon,
        tp,
        partial_gradient=config.sequence_parallel if partial_gradient is None else partial_gradient,
        centered_weight=config.apply_layernorm_1p,
        dtype=dtype_from_name(config.params_dtype),
        device=device,
        transformer_impl=config.transformer_impl,
        parameters=config.norm_parameter_names if parameters is None else parameters,
    )


def _registered_norm(
    kind: str,
    width: int,
    epsilon: float,
    tp: Group,
    partial_gradient: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Create a registered norm, and replace its parameters by parameters with a `ParamSpec`.

    Raises:
        ConfigurationError: it has a buffer, or a parameter that is a number or whose initial values differ.
    """
    with torch.device("cpu"):
        module: nn.Module = find_registered("normalization", kind).value(width, epsilon)
    for name, _ in module.named_buffers():
        raise ConfigurationError(f"normalization {kind}: it has a buffer, {name}; only parameters are supported")
    for name, parameter in list(module.named_parameters()):
        # A simulated device has no values, and needs none.
        values = None if isinstance(parameter.data, FakeTensor) else parameter.detach().flatten().tolist()
        if parameter.dim() == 0 or (values is not None and len(set(values)) != 1):
            raise ConfigurationError(
                f"normalization {kind}: the initial values of parameter {name} are not one number; give it at least "
                "one dimension, and create it with torch.full, torch.ones or torch.zeros"
            )
        shape, mean, path = tuple(parameter.shape), 0.0 if values is None else values[0], name.split(".")
        spec = replicated_spec(path[-1], shape, tp, partial_gradient, mean=mean)
        setattr(module.get_submodule(".".join(path[:-1])), path[-1], make_parameter(shape, spec, dtype, device))
    return module


def normalize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, kind: str, epsilon: float
) -> torch.Tensor:
    """Normalize ``x`` and return it in its own dtype. Shapes: ``x: [..., n]``, ``weight, bias: [n] -> [..., n]``."""
    width = x.shape[-1:]
    if kind == "LayerNorm":
        # torch's kernel accumulates low-precision inputs in float32.
        return F.layer_norm(x, width, weight, bias, epsilon)
    assert kind == "RMSNorm", kind
    if x.is_cuda:
        return F.rms_norm(x, width, weight, epsilon)
    # torch's CPU implementation uses the same operations; here the accumulation in float32 is explicit.
    wide = x.to(arithmetic_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    normalized = (wide * scale).to(x.dtype)
    return normalized if weight is None else normalized * weight


class AcrossHeadsNorm(nn.Module):
    """RMSNorm over all heads of each token together, with one weight per channel.

    If there are fewer heads than tensor-parallel ranks, several ranks hold copies of the same head. Forward and
    backward: an all-reduce of one number per token.

    Shapes: ``[s, b, heads/tp, d] -> [s, b, heads/tp, d]``.
    """

    def __init__(self, config: DecoderConfig, num_heads: int, tp: Group, device: torch.device | str) -> None:
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
        wide = x.to(arithmetic_dtype(x.dtype))
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        mean = sum_over_tensor_model_parallel_region(squares, self.tp) / (self.copies * self.width)
        normalized = (wide * torch.rsqrt(mean + self.epsilon)).to(x.dtype)
        return normalized * (self.weight + self.mean_weight).view(x.shape[-2:])


class PerHeadNorm(AcrossHeadsNorm):
    """Norm of each head by itself, with one weight per channel of each head and no bias.

    The weights are sharded as in `AcrossHeadsNorm`.

    Shapes: ``[s, b, heads/tp, d] -> [s, b, heads/tp, d]``.
    """

    def __init__(self, config: DecoderConfig, num_heads: int, tp: Group, device: torch.device | str) -> None:
        super().__init__(config, num_heads, tp, device)
        self.kind = config.normalization

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = normalize(x.to(arithmetic_dtype(x.dtype)), None, None, self.kind, self.epsilon)
        return (normalized * (self.weight + self.mean_weight).view(x.shape[-2:])).to(x.dtype)


def add_branch(x: torch.Tensor, branch: torch.Tensor | None, keys: RowKeys | None, probability: float) -> torch.Tensor:
    """Add a branch to the residual stream ``x``, after dropout if there are ``keys``.

    Without a branch ``x`` itself is returned.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]``.
    """
    if branch is None:
        return x
    return x + branch if keys is None else drop_hidden(branch, keys, probability, x)


def add_and_normalize(
    x: torch.Tensor,
    branch: torch.Tensor,
    keys: RowKeys | None,
    probability: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a branch to the residual stream, and return the sum and its norm.

    Shapes: as for `add_branch` and `normalize`.
    """
    total = add_branch(x, branch, keys, probability)
    return total, normalize(total, weight, bias, kind, epsilon)


@dataclass
class NormAhead:
    """State that fuses the last residual addition of a layer with the first norm of the next layer.

    ``following`` is the next layer's first norm, or None after the last layer. ``normalized`` is the output of this
    layer's first norm if the previous layer has computed it, else None.
    """

    following: ResidualNorm | ResidualSum | None = None
    normalized: torch.Tensor | None = None


class ResidualSum(nn.Module):
    """Add a branch to the residual stream without a norm. Called like `ResidualNorm`."""

    add_branch = staticmethod(add_branch)

    def forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum twice."""
        total = x if branch is None else self.add_branch(x, branch, keys, probability)
        return total, total


class ResidualNorm(Norm):
    """Add a branch to the residual stream, and normalize the sum.

    ``sums_branch_grad`` means that branches end with a bias, so that the backward kernel also sums the branch's
    gradient.

    Shapes: ``x, branch: [s, b, h]``, keys ``[s, b]`` ``-> [s, b, h]`` twice.
    """

    sums_branch_grad = False
    add_branch = staticmethod(add_branch)
    add_and_compute = staticmethod(add_and_normalize)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None = None,
        keys: RowKeys | None = None,
        probability: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the updated residual stream, which replaces ``x``, and its norm.

        On Triton one fused kernel computes both, and one kernel computes the gradients of both.
        """
        if self._runs_on_triton(x, branch):
            from megatron.core.ops.triton import MAX_WIDTH, add_and_normalize

            if self.weight is not None and self.shape[0] <= MAX_WIDTH:
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
        weight = self._whole_weight()
        is_of_engine = self.of_engine is not None and weight is not None and self.of_engine.takes(x, weight)
        if branch is None or self.module is not None or is_of_engine:
            total = x if branch is None else self.add_branch(x, branch, keys, probability)
            return total, self._normalize(total)
        return self.add_and_compute(x, branch, keys, probability, weight, self.bias, self.kind, self.epsilon)

    def _runs_on_triton(self, x: torch.Tensor, branch: torch.Tensor | None) -> bool:
        if self.kind not in ("LayerNorm", "RMSNorm") or self.weight is None:
            return False
        tensors = (x, self.weight) if branch is None else (x, self.weight, branch)
        return all(tensor.dtype == x.dtype for tensor in tensors) and runs_on_triton(*tensors)

    def of_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of a residual stream that `forward` returned, bitwise equal to the norm that it returned."""
        normalized: torch.Tensor = self(x)[1]
        return normalized


class PostNormResidual(ResidualNorm):
    """Add a branch to the residual stream and normalize the sum, which becomes the new residual stream."""

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
