"""Muon: orthogonalize the momentum of each matrix by Newton-Schulz iterations before adding it to the weights.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, https://arxiv.org/abs/2502.16982;
Bernstein and Newhouse 2024, https://arxiv.org/abs/2409.20325.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange, ShardRange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding import ParamSpec

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients a, b, c of ``a x + b x³ + c x⁵``: one triple per step, repeated from the first when used up."""
_EPSILON = 1e-7


def orthogonalize(matrix: torch.Tensor, num_steps: int, coefficients: str, dtype: torch.dtype) -> torch.Tensor:
    """Return approximately the nearest matrix with orthonormal rows, or columns if there are fewer columns.

    Singular values end between about 0.7 and 1.2. A zero matrix stays zero. Matmuls are computed in ``dtype``.

    Shapes: ``[rows, columns] -> [rows, columns]`` in the matrix's own dtype.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix) / matrix.norm().clamp(min=_EPSILON)
    x = x.to(dtype)
    triples = COEFFICIENTS[coefficients]
    for step in range(num_steps):
        a, b, c = triples[step % len(triples)]
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    result: torch.Tensor = (x.t() if is_tall else x).to(matrix.dtype)
    return result


def update_scale(rows: int, columns: int, mode: str) -> float:
    """Return the scale factor of an orthogonalized update of a matrix that maps ``columns`` features to ``rows``.

    ``spectral`` gives elements a root mean square of about 1 (0.2 times it is that of AdamW: Liu et al. 2025,
    https://arxiv.org/abs/2502.16982). ``unit_rms_norm`` and ``shape_scaling`` keep the size of outputs independent of
    the width.
    """
    ratio = {
        "spectral": max(rows, columns),
        "unit_rms_norm": rows / columns,
        "shape_scaling": max(1.0, rows / columns),
    }[mode]
    return math.sqrt(ratio)


_NOT_HIDDEN = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
_IN_16_BITS = ("low", "medium")


_Run = tuple[ShardRange, tuple[int, ...]]
"""Contiguous ranges of a shard merged into one, and their lengths."""


def merge_contiguous(ranges: Iterable[ShardRange]) -> list[_Run]:
    """Merge adjacent ranges of a shard, preserving their order."""
    runs: list[tuple[ShardRange, list[int]]] = []
    for at in ranges:
        if runs and (runs[-1][0].shard, runs[-1][0].end) == (at.shard, at.start):
            run, lengths = runs.pop()
            runs.append((replace(run, end=at.end), lengths))
        else:
            runs.append((at, []))
        runs[-1][1].append(at.end - at.start)
    return [(run, tuple(lengths)) for run, lengths in runs]


def is_orthogonalized(spec: ParamSpec) -> bool:
    """Return whether Muon updates a parameter: a matrix, also of an expert, but no embedding or output layer."""
    return len(spec.global_shape) == (3 if spec.is_expert else 2) and not spec.name.endswith(_NOT_HIDDEN)


class Muon:
    """Muon update of shards of matrices, with the interface of `InnerOptimizer`.

    The momentum is sharded as the parameter is. Whole matrices exist only on their owners, one batch at a time (see
    `MuonShardExchange`). Weight decay is decoupled: a weight decreases by learning rate × decay × weight.
    ``multipliers`` are the weight-decay multipliers of the parameters.

    Every rank of the exchange's groups must call ``step_if``, even without shards.
    """

    decides_on_device = True
    state_names = ("momentum_buffer",)
    num_updates = 0

    def __init__(
        self,
        config: OptimizerConfig,
        main_params: Sequence[torch.Tensor],
        multipliers: Sequence[float],
        exchange: MuonShardExchange,
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._runs = [merge_contiguous(batch.shard_ranges) for batch in exchange.batches]
        self._multipliers = tuple(multipliers)
        self._momentum = {id(parameter): torch.zeros_like(parameter) for parameter in main_params}
        self._learning_rate = self._weight_decay = 0.0

    def set_learning_rate(self, learning_rate: float, weight_decay: float) -> None:
        """Set the values of the next step."""
        self._learning_rate, self._weight_decay = learning_rate, weight_decay

    def step_if(
        self,
        is_finite: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        grad_multiplier: torch.Tensor,
    ) -> None:
        """Update from the gradients times a factor if ``is_finite`` is true; otherwise change nothing.

        Gradients in another dtype than their parameter's are converted one batch at a time.

        Shapes: ``is_finite: []`` of bool, ``gradients``: one per parameter, ``grad_multiplier: []`` float64.
        """
        factors = {dtype: grad_multiplier.to(dtype) for dtype in {parameter.dtype for parameter in parameters}}
        for batch, runs in zip(self._exchange.batches, self._runs, strict=True):
            # Temporary tensors of a batch are freed after each of these calls.
            values: list[torch.Tensor] = []
            for at, lengths in runs:
                parameter, factor = parameters[at.shard], factors[parameters[at.shard].dtype]
                values += self._advance(parameter, gradients[at.shard], at, factor, is_finite).split_with_sizes(lengths)
            self._move(parameters, runs, batch.compute(values, self._orthogonal), is_finite)

    def _advance(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        at: ShardRange,
        factor: torch.Tensor,
        is_finite: torch.Tensor,
    ) -> torch.Tensor:
        """Return the values to orthogonalize, and store the next momentum if ``is_finite`` is true."""
        config = self._config
        gradient = gradient[at.start : at.end].to(parameter.dtype) * factor
        stored = self._momentum[id(parameter)][at.start : at.end]
        momentum = stored.lerp(gradient, 1.0 - config.muon_momentum)
        torch.where(is_finite, momentum, stored, out=stored)
        return gradient.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum

    def _move(
        self,
        parameters: Sequence[torch.Tensor],
        runs: Sequence[_Run],
        updates: list[torch.Tensor],
        is_finite: torch.Tensor,
    ) -> None:
        """Decay the weights of some runs and subtract the updates of their ranges, if ``is_finite`` is true."""
        position = 0
        for at, lengths in runs:
            parameter = parameters[at.shard][at.start : at.end]
            new = parameter * (1.0 - self._learning_rate * self._weight_decay * self._multipliers[at.shard])
            of_run = updates[position : position + len(lengths)]
            torch._foreach_add_(new.split_with_sizes(lengths), of_run, alpha=-self._learning_rate)
            torch.where(is_finite, new, parameter, out=parameter)
            position += len(lengths)

    def names_of_state(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return self.state_names

    def state_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the momentum of a main parameter."""
        assert name in self.state_names
        return self._momentum[id(parameter)]

    def set_num_steps(self, num_steps: int) -> None:
        """Do nothing: no step differs from the first."""

    def _orthogonal(self, matrix: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """Return the update of a matrix, orthogonalized separately for each of several fused matrices."""
        fused_rows = spec.fused_rows
        if not fused_rows or ("linear_qkv" in spec.name and not self._config.muon_split_qkv):
            return self._scaled(matrix)
        # Rows of the fused matrices are interleaved: [repetitions, rows of all, columns].
        turns = matrix.view(-1, sum(fused_rows), matrix.shape[1])
        parts = [
            self._scaled(part.reshape(-1, matrix.shape[1])).view(len(turns), -1, matrix.shape[1])
            for part in turns.split_with_sizes(list(fused_rows), dim=1)
        ]
        return torch.cat(parts, dim=1).view(matrix.shape)

    def _scaled(self, matrix: torch.Tensor) -> torch.Tensor:
        config = self._config
        in_16_bits = config.muon_fp32_matmul_prec in _IN_16_BITS and matrix.dtype is torch.float32
        dtype = torch.bfloat16 if in_16_bits else matrix.dtype
        result = orthogonalize(matrix, config.muon_num_ns_steps, config.muon_coefficient_type, dtype)
        return result.mul_(
            update_scale(matrix.shape[0], matrix.shape[1], config.muon_scale_mode) * config.muon_extra_scale_factor
        )
