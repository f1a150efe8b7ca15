"""Layers spread over pipeline stages so that the last one, which has the output layer, takes as long as the others."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.gpt.gpt_config import GPTConfig


def output_layers(model: GPTConfig) -> float:
    """Return how many layers' work is behind the layers, the core of attention left out: the output layer is."""
    width = model.ffn_hidden_size
    if model.num_experts is not None:
        # Of experts those that a token goes to.
        of_experts = model.moe_router_topk * model.moe_ffn_hidden_size
        of_experts += model.moe_shared_expert_intermediate_size or 0
        share = sum(model.moe_layers) / model.num_layers
        width = round(share * of_experts + (1.0 - share) * width)
    ffn = width * (3 if model.is_gated else 2)
    attention = 2 * (model.query_projection_size + model.kv_projection_size)
    further, layer = model.num_further_tokens, ffn + attention
    # Layers that predict further tokens are there too, with the product in front of each.
    return ((1 + further) * model.padded_vocab_size + further * (layer + 2 * model.hidden_size)) / layer


def balanced_splits(model: GPTConfig, pp: int, even: int) -> Iterator[tuple[int, ...]]:
    """Yield layers by global stage, with one chunk a rank and with two, where the slowest rank has the least work.

    Layers that are over go to the last of the other ranks, since the first ranks have the most in flight. Nothing is
    yielded where a chunk would have no layer, or where that is the split with ``even`` layers on every rank.
    """
    if pp < 2:
        return
    layers, output = model.num_layers, output_layers(model)
    last = min(range(1, layers // pp + 2), key=lambda count: max(-(-(layers - count) // (pp - 1)), count + output))
    base, over = divmod(layers - last, pp - 1)
    ranks = [*(base + (rank >= pp - 1 - over) for rank in range(pp - 1)), last]
    if min(ranks) < 1 or set(ranks) == {even}:
        return
    yield tuple(ranks)
    if min(ranks) > 1:
        yield (*(count // 2 for count in ranks), *(count - count // 2 for count in ranks))
