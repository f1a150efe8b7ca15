"""Multi-token prediction: layers in a row behind the model, each of which predicts one token further.

Gloeckle et al. 2024, https://arxiv.org/abs/2404.19737; DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import DropoutKeys
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.dropout import HiddenDropout, require_keys
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, make_norm


def further_layer_numbers(config: TransformerConfig) -> range:
    """Return the numbers by which dropout knows the layers of the further tokens, and then their embeddings."""
    return range(config.num_layers, config.num_layers + 2 * config.num_further_tokens)


class PredictionLayer(nn.Module):
    """Join the states of each position with the embedding of a token ahead of it, and apply a transformer layer.

    ``depth`` counts from 0. The transformer layer is of the kind of the model's last one.

    Shapes: ``[s, b, h], [s, b, h] -> [s, b, h]``; all are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        depth: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None,
        experts: ExpertGroups | None,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        self.embedding_site = config.num_layers + config.num_further_tokens + depth
        self.enorm = make_norm(config, tp, device)
        self.hnorm = make_norm(config, tp, device)
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            tp,
            has_bias=False,
            sequence_parallel=config.sequence_parallel,
            init_std=config.init_method_std,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            library=config.cpu_matmul,
            gather_output=not config.sequence_parallel,
        )
        self.embedding_dropout = HiddenDropout(config.hidden_dropout)
        self.transformer_layer = TransformerLayer(config, config.num_layers + depth, tp, device, cp, experts)
        self.final_layernorm = make_norm(config, tp, device)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        dropout: DropoutKeys | None,
        padding_mask: torch.Tensor | None = None,
    ) -> LayerOutput:
        """Return the normalised states behind the layer, and its auxiliary losses."""
        if self.embedding_dropout.is_active:
            embedded = self.embedding_dropout(embedded, require_keys(dropout).after_attention(self.embedding_site))
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        if self.sequence_parallel:
            joined = gather_from_tensor_model_parallel_region(joined, self.tp)
            joined = scatter_to_sequence_parallel_region(joined, self.tp)
        hidden, losses = self.transformer_layer(joined, pattern, angles, None, dropout, None, padding_mask)
        return LayerOutput(self.final_layernorm(hidden), losses)


class MultiTokenPrediction(nn.Module):
    """Hold the layers that predict further tokens, on the last pipeline stage.

    ``made`` is called with each layer before the next one is made.

    Shapes: ``[s, b, h] -> n x [s, b, h]``; all are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
        experts: ExpertGroups | None = None,
        made: Callable[[nn.Module], None] = lambda layer: None,
    ) -> None:
        super().__init__()
        self.recomputes = config.recompute_granularity == "full"
        self.layers = nn.ModuleDict()
        for depth in range(config.num_further_tokens):
            self.layers[str(depth)] = layer = PredictionLayer(config, depth, tp, device, cp, experts)
            made(layer)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        dropout: DropoutKeys | None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], tuple[AuxiliaryLoss, ...]]:
        """Return the states of each further prediction, and the layers' auxiliary losses.

        ``hidden`` are the model's last states, ``embedded`` the tokens that the layers are given, one layer's after the
        other's along the batch.

        Shapes: ``embedded: [s, n * b, h]``.
        """
        states: list[torch.Tensor] = []
        losses: tuple[AuxiliaryLoss, ...] = ()
        for layer, tokens in zip(self.layers.values(), embedded.chunk(len(self.layers), dim=1)):
            arguments = hidden, tokens, pattern, angles, dropout, padding_mask
            is_again = self.recomputes and self.training
            output = recompute(layer, *arguments) if is_again else layer(*arguments)
            hidden, found = cast("LayerOutput", output)
            states.append(hidden)
            losses += found
        return states, losses
