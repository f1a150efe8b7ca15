"""The parameters of the low-rank adapters of a linear layer on one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.adapters.adapter_targets import WHOLE


def adapter_parameters(model: GPTConfig, name: str) -> Iterator[tuple[int, int]]:
    """Yield the parameters of a linear layer's adapters in the order of the model.

    Each is a size and, where its gradient is a part, how many tensor-parallel ranks hold a copy (see `ChunkParameter`).
    """
    t, h, f, rank = model.tensor_model_parallel_size, model.hidden_size, model.ffn_hidden_size, model.lora_rank
    of_cut_tokens = t if t > 1 and model.sequence_parallel else 0
    for part in model.adapted_parts.get(name, ()):
        if name in ("linear_proj", "linear_fc2"):
            yield rank * (model.query_projection_size if name == "linear_proj" else f) // t, 0
            yield h * rank, of_cut_tokens
            continue
        yield rank * h, of_cut_tokens
        for rows, copies in _rows(model, name, part):
            yield rows * rank, copies


def _rows(model: GPTConfig, name: str, part: str) -> Iterator[tuple[int, int]]:
    """Yield the rows that a rank holds of a part of a column-parallel layer, and how many ranks hold them."""
    t, groups = model.tensor_model_parallel_size, model.num_query_groups
    if name == "linear_fc1":
        yield model.ffn_hidden_size * (2 if part == WHOLE and model.is_gated else 1) // t, 0
        return
    is_shared = groups % t != 0
    queries = model.query_projection_size // t
    keys = (model.kv_channels, t // groups) if is_shared else (model.kv_projection_size // t, 0)
    if part == WHOLE and is_shared:
        yield queries, 0
        yield 2 * keys[0], keys[1]
    elif part == WHOLE:
        yield queries + 2 * keys[0], 0
    else:
        yield (queries, 0) if part == "q" else keys
