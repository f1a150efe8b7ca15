"""The parameters of a model chunk on one tensor-parallel rank: their sizes, and which gradients are parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents


@dataclass(frozen=True)
class ChunkParameter:
    """Hold a parameter's local size and, where its gradient is a part, how many of the t ranks hold a copy.

    ``is_tied`` says that the other end of the pipeline holds it too.
    """

    size: int
    copies_to_sum: int = 0
    is_tied: bool = False


def chunk_parameters(model: GPTConfig, chunk: StageContents) -> Iterator[ChunkParameter]:
    """Yield a chunk's parameters in the order of the model."""
    t, h, f, d = model.tensor_model_parallel_size, model.hidden_size, model.ffn_hidden_size, model.kv_channels
    is_cut = model.sequence_parallel and t > 1
    is_tied = not model.untie_embeddings_and_output_weights and chunk.has_embedding != chunk.has_loss
    vocabulary = ChunkParameter(model.padded_vocab_size // t * h, is_tied=is_tied)

    def replicated(size: int, is_partial: bool = is_cut) -> ChunkParameter:
        return ChunkParameter(size, t if is_partial and t > 1 else 0)

    def norm(width: int, is_partial: bool = is_cut) -> Iterator[ChunkParameter]:
        yield replicated(width, is_partial)
        if model.normalization == "LayerNorm":
            yield replicated(width, is_partial)

    def linear(rows: int, columns: int, bias: ChunkParameter | None) -> Iterator[ChunkParameter]:
        yield ChunkParameter(rows * columns)
        if bias is not None:
            yield bias

    def query_key_value() -> Iterator[ChunkParameter]:
        queries, groups = model.query_projection_size // t, model.num_query_groups
        if groups % t == 0:
            rows = queries + 2 * model.kv_projection_size // t
            yield from linear(rows, h, ChunkParameter(rows) if model.has_qkv_bias else None)
            return
        for width in (h, 1) if model.has_qkv_bias else (h,):
            yield ChunkParameter(queries * width)
            yield ChunkParameter(2 * d * width, t // groups)

    def has_bias(bias: ChunkParameter) -> ChunkParameter | None:
        return bias if model.add_bias_linear else None

    if chunk.has_embedding:
        yield vocabulary
        if model.position_embedding_type == "learned_absolute":
            yield replicated(model.max_position_embeddings * h)
    for _ in chunk.layer_numbers:
        yield from norm(h)
        yield from linear(h, model.query_projection_size // t, has_bias(replicated(h)))
        yield from query_key_value()
        if model.qk_layernorm:
            yield from norm(d, True)
            yield from norm(d, True)
        yield from norm(h)
        gated = f * (2 if model.swiglu else 1) // t
        yield from linear(gated, h, has_bias(ChunkParameter(gated)))
        yield from linear(h, f // t, has_bias(replicated(h)))
    if chunk.has_loss:
        yield from norm(h)
        if model.untie_embeddings_and_output_weights or not chunk.has_embedding:
            yield vocabulary
