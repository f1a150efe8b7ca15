"""What latent attention sends over the tensor-parallel ranks."""

from __future__ import annotations

from megatron.core.transformer.decoder_config import DecoderConfig
from tests.closed_forms.float8_traffic import Add


def add_latent(
    add: Add, model: DecoderConfig, token_bytes: int, entered: int, left: int, backward: int, again: int
) -> None:
    """Add what so many attentions send that begin, end, and run backward; ``again`` widen their heads once more.

    ``token_bytes`` are the tokens of the whole group times the bytes of a number. The narrow maps are whole on every
    rank: what travels is what heads are made of.
    """
    widths = (model.mla.q_lora_rank or model.hidden_size, model.mla.kv_lora_rank)
    hidden, rotary = token_bytes * model.hidden_size, token_bytes * model.mla.qk_pos_emb_head_dim
    if not model.sequence_parallel:
        for width in widths:
            add("all_reduce", token_bytes * width, backward)
        add("all_reduce", rotary, backward)
        add("all_reduce", hidden, left)
        return
    for width in widths:
        # Gathered for the product, and once more for the gradient of its weight.
        add("all_gather", token_bytes * width, entered + again + backward)
        add("reduce_scatter", token_bytes * width, backward)
    add("all_gather", rotary, entered)
    add("reduce_scatter", rotary, backward)
    add("reduce_scatter", hidden, left)
    add("all_gather", hidden, backward)
