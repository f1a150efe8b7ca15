"""What the first tensor-parallel rank sends the others of the samples that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.pipeline_parallel.stage_layout import StageContents

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig


def sample_bytes(config: RunConfig, tokens: int, chunks: Sequence[StageContents]) -> int:
    """Return the bytes of a micro-batch of which a rank of these chunks has so many tokens."""
    model, data = config.model, config.data
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    has_loss = any(chunk.has_loss for chunk in chunks)
    token = 2 if model.vocab_size <= 1 << 16 else 4
    position = 2 if data.seq_length <= 1 << 16 else 4
    num_bytes = tokens * token * has_embedding
    # Labels, one byte a token that says whether it counts, and how many of the whole micro-batch do.
    num_bytes += (tokens * (token + 1) + 8) * has_loss
    is_rotary = model.position_embedding_type == "rope"
    if data.reset_position_ids and (is_rotary or (model.position_embedding_type != "none" and has_embedding)):
        num_bytes += tokens * position
    if data.reset_attention_mask and any(chunk.layer_numbers for chunk in chunks):
        num_bytes += tokens * model.context_parallel_size * position  # of the whole sequences
    if data.has_padding and any(
        model.has_experts_among(chunk.layer_numbers, is_last=chunk.has_loss) for chunk in chunks
    ):
        num_bytes += tokens * model.context_parallel_size  # one byte a position of the whole sequences
    return num_bytes
