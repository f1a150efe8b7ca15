"""A run of transformer layers on one pipeline stage, with activation recompute, closed by the final norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.process_group import Group
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.attention import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, make_norm


class TransformerBlock(nn.Module):
    """Hold the layers numbered ``layer_numbers`` (global, from 0); the last stage also holds the final norm.

    Layers are keyed by their global numbers, so that parameter names are the same at any pipeline layout.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_numbers: Sequence[int],
        has_final_norm: bool,
        tp: Group,
        rng: RngStreams,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rng = rng
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(config, number, tp, rng, device, cp) for number in layer_numbers}
        )
        self.final_layernorm = make_norm(config, tp, device) if has_final_norm else None

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after the last of these layers."""
        layers = list(self.layers.values())
        if self.training and self.config.recompute_granularity == "full":
            x = self._recomputed(layers, x, mask, angles)
        else:
            for layer in layers:
                x = layer(x, mask, angles, cache)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _recomputed(
        self, layers: list[nn.Module], x: torch.Tensor, mask: torch.Tensor | None, angles: RotaryAngles | None
    ) -> torch.Tensor:
        """Run the layers so that only the inputs of recomputed groups are kept."""
        length = self.config.recompute_num_layers or 1
        if self.config.recompute_method == "block":
            groups = [layers[i : i + 1] for i in range(min(length, len(layers)))]
            kept = layers[len(groups) :]
        else:
            groups = [layers[i : i + length] for i in range(0, len(layers), length)]
            kept = []

        def run(group: list[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
            for layer in group:
                hidden = layer(hidden, mask, angles)
            return hidden

        for group in groups:
            x = recompute(lambda hidden, group=group: run(group, hidden), self.rng, x)
        for layer in kept:
            x = layer(x, mask, angles)
        return x
