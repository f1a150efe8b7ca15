"""The widths of a transformer layer's linear layers on one tensor-parallel rank."""

from __future__ import annotations

from megatron.core.context_parallel.head_sharing import key_value_heads_of_rank
from megatron.core.models.gpt.gpt_config import GPTConfig


def layer_widths(model: GPTConfig, *, has_experts: bool = False) -> dict[str, tuple[int, int]]:
    """Return what each linear layer takes and gives, by its name in the model and in the order of the model.

    Of a feed-forward of experts only the shared one is there, if it is.
    """
    t, h = model.tensor_model_parallel_size, model.hidden_size
    queries, keys = model.query_projection_size // t, key_value_width(model)
    whole = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    ffn = whole // t
    widths = {"linear_qkv": (h, queries + 2 * keys), "linear_proj": (queries, h)}
    if ffn:
        widths |= {"linear_fc1": (h, ffn * (2 if model.is_gated else 1)), "linear_fc2": (ffn, h)}
    return widths


def key_value_width(model: GPTConfig) -> int:
    """Return the width of all keys on one tensor-parallel rank; ranks beyond the groups hold copies."""
    return key_value_heads_of_rank(model.num_query_groups, model.tensor_model_parallel_size) * model.kv_channels
