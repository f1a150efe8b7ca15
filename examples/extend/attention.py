"""Train with an attention of your own: ``megatron train --script attention.py --attention gated FLAGS``.

The heads' output is multiplied by the sigmoid of a projection of the layer's input: Qiu et al. 2025,
https://arxiv.org/abs/2505.06708.
"""

from typing import Any

import torch

from megatron.core.process_group import Group
from megatron.core.tensor_parallel import ColumnShardedLinear
from megatron.core.transformer import DecoderConfig, SelfAttention
from megatron.training import pretrain, register_attention


class GatedAttention(SelfAttention):
    def __init__(
        self, config: DecoderConfig, layer_number: int, tp: Group, device: torch.device, cp: Group | None = None
    ) -> None:
        super().__init__(config, layer_number, tp, device, cp)
        # [s, b, h] -> [s, b, n/tp * d]: each tensor-parallel rank computes the gates of its own heads.
        self.linear_gate = ColumnShardedLinear(
            config.hidden_size,
            config.context_size,
            tp,
            config=config,
            init_std=config.init_method_std,
            bias=False,
            device=device,
        )

    def context(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return super().context(x, *args) * torch.sigmoid(self.linear_gate(x))


def multiply_adds(config: DecoderConfig) -> float:
    return config.hidden_size * config.context_size


register_attention("gated", GatedAttention, multiply_adds=multiply_adds)

if __name__ == "__main__":
    pretrain()
