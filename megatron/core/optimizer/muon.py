"""Muon: momentum whose matrices are made orthogonal before they are added to the weights.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.optimizer.matrix_owners import MatrixOwners
from megatron.core.optimizer.newton_schulz import orthogonalize, update_scale
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding import ParamSpec

_NOT_HIDDEN = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
_IN_16_BITS = ("low", "medium")


def is_orthogonalized(spec: ParamSpec) -> bool:
    """Return whether Muon updates a parameter: a matrix, or one of each expert, but no embedding or output layer."""
    return len(spec.global_shape) == (3 if spec.is_expert else 2) and not spec.name.endswith(_NOT_HIDDEN)


class Muon:
    """Update parts of matrices from their ``grad``, as `InnerOptimizer` does parts of any parameter.

    The momentum lies where the parameter's part does; whole matrices exist on their owners only, those of one round at
    a time (see `MatrixOwners`). Decay is decoupled: a weight loses learning rate × decay of itself.
    ``multipliers`` are those of the weight decay, one for each parameter.

    Every rank of the owners' groups must call ``step`` and ``step_if``, also one without parts.
    """

    decides_on_device = True
    state_names = ("momentum_buffer",)
    num_updates = 0

    def __init__(
        self,
        config: OptimizerConfig,
        main_params: Sequence[torch.Tensor],
        multipliers: Sequence[float],
        owners: MatrixOwners,
    ) -> None:
        self._config = config
        self._owners = owners
        self._multipliers = tuple(multipliers)
        self._momentum = {id(parameter): torch.zeros_like(parameter) for parameter in main_params}
        self._learning_rate = self._weight_decay = 0.0

    def set_learning_rate(self, learning_rate: float, weight_decay: float) -> None:
        """Set what the next step uses."""
        self._learning_rate, self._weight_decay = learning_rate, weight_decay

    def step_if(
        self, is_finite: torch.Tensor, parameters: Sequence[torch.Tensor], grad_multiplier: torch.Tensor
    ) -> None:
        """Update from the gradients times a factor where ``is_finite`` is true; change nothing where it is not.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        config, factor = self._config, grad_multiplier
        for matrices in self._owners.rounds:
            updates = []
            for at in matrices.stretches:
                parameter = parameters[at.part]
                assert parameter.grad is not None
                gradient = parameter.grad[at.start : at.end] * factor.to(parameter.dtype)
                stored = self._momentum[id(parameter)][at.start : at.end]
                momentum = stored.lerp(gradient, 1.0 - config.muon_momentum)
                updates.append(gradient.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum)
                stored.copy_(torch.where(is_finite, momentum, stored))
            updates = matrices.compute(updates, self._orthogonal)
            for at, update in zip(matrices.stretches, updates, strict=True):
                parameter = parameters[at.part][at.start : at.end]
                kept = parameter * (1.0 - self._learning_rate * self._weight_decay * self._multipliers[at.part])
                new = kept.add_(update, alpha=-self._learning_rate)
                parameter.copy_(torch.where(is_finite, new, parameter))

    def step(self, parameters: Sequence[torch.Tensor], grad_multiplier: float) -> None:
        """Update from the gradients times a factor."""
        factor = torch.tensor(grad_multiplier, dtype=torch.float64)
        self.step_if(torch.ones((), dtype=torch.bool), parameters, factor)

    def state_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the momentum of a main parameter."""
        assert name in self.state_names
        return self._momentum[id(parameter)]

    def set_num_steps(self, num_steps: int) -> None:
        """Take note of nothing: no step is another than the first."""

    def _orthogonal(self, matrix: torch.Tensor, fused_rows: tuple[int, ...]) -> torch.Tensor:
        """Return a matrix's update, that of each matrix by itself where several are fused."""
        is_query_key_value = len(fused_rows) == 3
        if not fused_rows or (is_query_key_value and not self._config.muon_split_qkv):
            return self._scaled(matrix)
        # Rows of the matrices take turns: [turns, rows of all, columns].
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
