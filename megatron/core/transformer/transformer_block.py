"""A run of transformer layers on one pipeline stage, with activation recompute, closed by the final norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import DropoutKeys
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.graphed_layers import GraphedLayers, GraphUnit
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.residual_norm import NormAhead
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, make_norm


class TransformerBlock(nn.Module):
    """Hold the layers numbered ``layer_numbers`` (global, from 0); the last stage also holds the final norm.

    Layers are keyed by their global numbers, so that parameter names are the same at any pipeline layout. In training
    they run as ``graphs`` where these are set and warm.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_numbers: Sequence[int],
        has_final_norm: bool,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(config, number, tp, device, cp) for number in layer_numbers}
        )
        self.final_layernorm = make_norm(config, tp, device) if has_final_norm else None
        self.graphs: GraphedLayers | None = None

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        """Return the hidden states after the last of these layers, and the auxiliary losses of all.

        Raises:
            ConfigurationError: layers drop something in training, and ``dropout`` is not given.
        """
        losses: list[AuxiliaryLoss] = []

        def run(group: list[TransformerLayer], hidden: torch.Tensor, keys: DropoutKeys | None) -> LayerOutput:
            losses_of_group: list[AuxiliaryLoss] = []
            ahead = NormAhead()
            # A layer's last branch is added in the pass of the next one's first norm.
            for layer, following in zip(group, (*group[1:], None)):
                ahead.following = None if following is None else following.input_layernorm
                hidden, found = layer(hidden, pattern, angles, cache, keys, ahead)
                losses_of_group += found
            return LayerOutput(hidden, tuple(losses_of_group))

        def units() -> list[GraphUnit]:
            """Return each group to recompute, and each layer after them."""
            recomputed, kept = self._groups()
            again = [GraphUnit(group, partial(recompute, run, group)) for group in recomputed]
            return again + [GraphUnit([layer], partial(run, [layer])) for layer in kept]

        if self.graphs is not None and self.layers and self.training and self.graphs.is_warm:
            if pattern.document_ids is not None or pattern.mask is not None:
                raise ConfigurationError(
                    "--cuda-graph-impl local: attention follows documents or a mask, which change from one micro-batch "
                    "to the next; leave it out"
                )
            x = self.graphs.run(units, x, dropout)
        else:
            recomputed, kept = self._groups()
            for group in recomputed:
                x, found = recompute(run, group, x, dropout)
                losses += found
            x, found = run(kept, x, dropout)
            losses += found
        return LayerOutput(x if self.final_layernorm is None else self.final_layernorm(x), tuple(losses))

    def _groups(self) -> tuple[list[list[TransformerLayer]], list[TransformerLayer]]:
        """Return the groups of layers of which only the inputs are kept, and the layers after them."""
        layers = [cast("TransformerLayer", layer) for layer in self.layers.values()]
        if not self.training or self.config.recompute_granularity != "full":
            return [], layers
        length = self.config.recompute_num_layers or 1
        if self.config.recompute_method == "block":
            return [[layer] for layer in layers[:length]], layers[length:]
        return [layers[i : i + length] for i in range(0, len(layers), length)], []
