"""Token embeddings, learned positions and the dropout on both."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.layers import (
    VocabParallelEmbedding,
    embedding_lookup,
    make_parameter,
    replicated_spec,
)
from megatron.core.transformer.dropout import HiddenDropout, require_keys


class PositionEmbedding(nn.Module):
    """Look learned positions up; under sequence parallelism each rank looks up its own part of the sequence.

    Shapes: ``position_ids: [b, s] -> [s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism).
    """

    def __init__(self, config: GPTConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = config.sequence_parallel
        shape = (config.max_position_embeddings, config.hidden_size)
        spec = replicated_spec("weight", shape, tp, config.sequence_parallel, std=config.embedding_init_std)
        self.weight = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the position embeddings, sequence first."""
        positions = position_ids.t()
        if self.sequence_parallel:
            length = positions.shape[0] // self.tp.size
            positions = positions.narrow(0, self.tp.rank * length, length)
        return embedding_lookup(positions, self.weight)


class GPTEmbedding(nn.Module):
    """Embed tokens and, where positions are learned, add the positions.

    Shapes: ``tokens, position_ids: [b, s] -> [s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism).
    """

    def __init__(self, config: GPTConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.padded_vocab_size,
            config.hidden_size,
            tp,
            sequence_parallel=config.sequence_parallel,
            init_std=config.embedding_init_std,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
        )
        self.scale: float | None = None
        if config.scale_embeddings:
            # Rounded to the embeddings' own precision, as models are trained with it; a number, which no step copies.
            dtype = dtype_from_name(config.params_dtype)
            self.scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self.multiplier = config.mup_embedding_mult
        if self.multiplier != 1.0:
            self.scale = self.multiplier * (1.0 if self.scale is None else self.scale)
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, tp, device)
        self.dropout = HiddenDropout(config.hidden_dropout)

    def of_words(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' own embeddings, without positions and dropout."""
        hidden: torch.Tensor = self.word_embeddings(tokens)
        return hidden if self.scale is None else hidden * self.scale

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None, dropout: DropoutKeys | None = None
    ) -> torch.Tensor:
        """Return the first hidden states; positions are for those that are learned.

        Raises:
            ConfigurationError: the embedding drops something in training, and is given no keys.
        """
        hidden = self.of_words(tokens)
        if self.position_embeddings is not None:
            assert position_ids is not None, "learned positions are looked up"
            positions = self.position_embeddings(position_ids)
            hidden = hidden + (positions if self.multiplier == 1.0 else positions * self.multiplier)
        keys = require_keys(dropout).of_embedding if self.dropout.is_active else None
        output: torch.Tensor = self.dropout(hidden, keys)
        return output
