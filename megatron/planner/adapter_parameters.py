"""The parameters of the low-rank adapters of a linear layer on one tensor-parallel rank, and of those of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.adapters.adapter_targets import WHOLE


def adapter_parameters(model: GPTConfig, name: str, width: int) -> Iterator[int]:
    """Yield the parameters of a linear layer's adapters in the order of the model.

    ``width`` is the width of the feed-forward, for a layer of one.
    """
    t, h, rank = model.tensor_model_parallel_size, model.hidden_size, model.lora_rank
    for part in model.adapted_parts.get(name, ()):
        if name in ("linear_proj", "linear_fc2"):
            yield rank * (model.query_projection_size if name == "linear_proj" else width) // t
            yield h * rank
            continue
        yield rank * h
        for rows in _rows(model, name, part, width):
            yield rows * rank


def expert_adapter_parameters(model: GPTConfig, name: str) -> Iterator[int]:
    """Yield the parameters of the adapters of a rank's experts as `adapter_parameters` does."""
    sizes, h, rank = model.parallel_sizes, model.hidden_size, model.lora_rank
    num_local, width = (model.num_experts or 0) // sizes.ep, model.moe_ffn_hidden_size // sizes.expert_tp
    for part in model.adapted_parts.get(name, ()):
        if name == "linear_fc2":
            yield num_local * rank * width
            yield num_local * h * rank
        else:
            yield num_local * rank * h
            yield num_local * width * (2 if part == WHOLE and model.is_gated else 1) * rank


def _rows(model: GPTConfig, name: str, part: str, width: int) -> Iterator[int]:
    """Yield the rows that a rank holds of a part of a column-parallel layer."""
    t, groups = model.tensor_model_parallel_size, model.num_query_groups
    if name == "linear_fc1":
        yield width * (2 if part == WHOLE and model.is_gated else 1) // t
        return
    is_shared = groups % t != 0
    queries = model.query_projection_size // t
    keys = model.kv_channels if is_shared else model.kv_projection_size // t
    if part == WHOLE and is_shared:
        yield queries
        yield 2 * keys
    elif part == WHOLE:
        yield queries + 2 * keys
    else:
        yield queries if part == "q" else keys
