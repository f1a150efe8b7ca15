"""The parameters of the low-rank adapters of a linear layer on one tensor-parallel rank, and of those of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.adapters.adapter_targets import WHOLE


def adapter_parameters(model: GPTConfig, name: str, width: int) -> Iterator[tuple[int, int]]:
    """Yield the parameters of a linear layer's adapters in the order of the model.

    ``width`` is that of the feed-forward, where the layer is of one. Each is a size and, where its gradient is a part,
    how many tensor-parallel ranks hold a copy (see `ChunkParameter`).
    """
    t, h, rank = model.tensor_model_parallel_size, model.hidden_size, model.lora_rank
    of_cut_tokens = t if t > 1 and model.sequence_parallel else 0
    for part in model.adapted_parts.get(name, ()):
        if name in ("linear_proj", "linear_fc2"):
            yield rank * (model.query_projection_size if name == "linear_proj" else width) // t, 0
            yield h * rank, of_cut_tokens
            continue
        yield rank * h, of_cut_tokens
        for rows, copies in _rows(model, name, part, width):
            yield rows * rank, copies


def expert_adapter_parameters(model: GPTConfig, name: str) -> Iterator[tuple[int, int]]:
    """Yield the parameters of the adapters of a rank's experts as `adapter_parameters` does.

    What neighbours that cut an expert hold alike, each has a part of the gradient of.
    """
    sizes, h, rank = model.parallel_sizes, model.hidden_size, model.lora_rank
    etp, num_local = sizes.expert_tp, (model.num_experts or 0) // sizes.ep
    copies, width = etp if etp > 1 else 0, model.moe_ffn_hidden_size // etp
    for part in model.adapted_parts.get(name, ()):
        if name == "linear_fc2":
            yield num_local * rank * width, 0
            yield num_local * h * rank, copies
        else:
            yield num_local * rank * h, copies
            yield num_local * width * (2 if part == WHOLE and model.is_gated else 1) * rank, 0


def _rows(model: GPTConfig, name: str, part: str, width: int) -> Iterator[tuple[int, int]]:
    """Yield the rows that a rank holds of a part of a column-parallel layer, and how many ranks hold them."""
    t, groups = model.tensor_model_parallel_size, model.num_query_groups
    if name == "linear_fc1":
        yield width * (2 if part == WHOLE and model.is_gated else 1) // t, 0
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
