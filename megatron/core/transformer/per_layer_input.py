"""Per-layer input embeddings: each layer adds a branch that multiplies a separate embedding of the input tokens.

Introduced in Gemma 3n: https://ai.google.dev/gemma/docs/gemma-3n (2025).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megatron.core.ops.gated_activation import gated_activation
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import VocabShardedEmbedding
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.multi_latent_attention import ReplicatedLinear
from megatron.core.transformer.norm import make_norm


class PerLayerInputs(nn.Module):
    """Inputs of all layers: embeddings of the tokens, and a normalized projection of the first hidden states.

    The two are added and divided by the square root of 2.

    Shapes: ``tokens: [b, s], hidden: [s, b, h] -> [s, b, layers * d]``; under sequence parallelism ``hidden`` and the
    result have ``s/tp`` positions.
    """

    def __init__(
        self,
        config: DecoderConfig,
        vocab_size: int,
        padded_vocab_size: int,
        init_std: float,
        tp: Group,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        width, dtype = config.hidden_size_per_layer_input, dtype_from_name(config.params_dtype)
        self.width, self.factor = width, config.hidden_size**-0.5
        self.word_embeddings = VocabShardedEmbedding(
            vocab_size,
            padded_vocab_size,
            config.num_layers * width,
            tp,
            sequence_parallel=config.sequence_parallel,
            init_std=init_std,
            dtype=dtype,
            device=device,
        )
        # Rounded like the scale of the word embeddings.
        self.scale = torch.tensor(width**0.5, dtype=dtype, device="cpu").item()
        self.projection = ReplicatedLinear(config, config.hidden_size, config.num_layers * width, tp, device)
        self.norm = make_norm(replace(config, hidden_size=width), tp, device)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the inputs of all layers, side by side."""
        projected = self.projection(hidden) * self.factor
        normalized = self.norm(projected.unflatten(-1, (-1, self.width))).flatten(-2)
        total: torch.Tensor = (normalized + self.word_embeddings(tokens) * self.scale) * 2.0**-0.5
        return total


class PerLayerBranch(nn.Module):
    """Branch of a layer: ``norm(projection(activation(gate(x)) * input))``.

    The two linear layers are replicated over tensor-parallel ranks.

    Shapes: ``x: [s, b, h], given: [s, b, d] -> [s, b, h]``; all have ``s/tp`` positions under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.kind = config.activation
        self.gate = ReplicatedLinear(config, hidden, width, tp, device)
        self.projection = ReplicatedLinear(config, width, hidden, tp, device)
        self.norm = make_norm(config, tp, device)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the branch, for the residual stream ``x`` and the layer's input."""
        gated = gated_activation(torch.cat((self.gate(x), given), dim=-1), self.kind)
        branch: torch.Tensor = self.norm(self.projection(gated))
        return branch
