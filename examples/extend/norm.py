"""Train with a norm of your own: ``megatron train --script norm.py --normalization dynamic_tanh FLAGS``.

Dynamic tanh: Zhu et al. 2025, https://arxiv.org/abs/2503.10622.
"""

import torch
from torch import nn

from megatron.training import pretrain, register_norm


class DynamicTanh(nn.Module):
    """Compute ``weight * tanh(alpha * x) + bias``."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


register_norm("dynamic_tanh", DynamicTanh)

if __name__ == "__main__":
    pretrain()
