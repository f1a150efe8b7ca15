"""Widths of a transformer layer's linear layers on one tensor-parallel rank."""

from __future__ import annotations

from megatron.core.context_parallel.key_value_heads import key_value_heads_of_rank
from megatron.core.transformer.decoder_config import DecoderConfig


def layer_widths(model: DecoderConfig, *, has_experts: bool = False) -> dict[str, tuple[int, int]]:
    """Return what each linear layer takes and gives, by its name in the model and in the order of the model.

    Of a feed-forward of experts only the shared one is there, if it is.
    """
    t, h = model.tensor_model_parallel_size, model.hidden_size
    queries = model.query_projection_size // t
    keys = key_value_heads_of_rank(model.num_query_groups, t) * model.head_width
    whole = (model.moe.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    ffn = whole // t
    widths = {"linear_qkv": (h, queries + 2 * keys), "linear_proj": (queries, h)}
    if model.mla.multi_latent_attention:
        widths = _latent_widths(model)
    if ffn:
        widths |= {"linear_fc1": (h, ffn * (2 if model.is_gated else 1)), "linear_fc2": (ffn, h)}
    return widths


def is_whole_on_ranks(name: str) -> bool:
    """Return whether every tensor-parallel rank holds a layer whole, and multiplies its own rows of the stream."""
    return name.endswith("_down_proj")


def _latent_widths(model: DecoderConfig) -> dict[str, tuple[int, int]]:
    h, heads = model.hidden_size, model.num_attention_heads // model.tensor_model_parallel_size
    narrow, queries = model.mla.q_lora_rank, heads * model.mla.latent_query_width
    of_queries = {"linear_q_proj": (h, queries)}
    if narrow is not None:
        of_queries = {"linear_q_down_proj": (h, narrow), "linear_q_up_proj": (narrow, queries)}
    return of_queries | {
        "linear_kv_down_proj": (h, model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim),
        "linear_kv_up_proj": (model.mla.kv_lora_rank, heads * (model.mla.qk_head_dim + model.mla.v_head_dim)),
        "linear_proj": (heads * model.mla.v_head_dim, h),
    }
