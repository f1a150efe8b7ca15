"""Which layers run forward again in the backward pass, and where that ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig


def recomputed_layers(model: DecoderConfig, layers: int) -> tuple[int, set[int]]:
    """Return how many layers, the first ones, run forward again, and which stop before their last communication.

    A recomputed group of layers ends where the backward pass has all that it saved. Without dropout nothing is saved
    behind the last layer's fc2, whose sum over the ranks is then left out, unless a norm comes after it, or a branch of
    per-layer inputs. Adapters are not considered: a layer whose fc2 has one does not stop early.
    """
    if model.recompute_granularity != "full":
        return 0, set()
    length = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        recomputed, length = min(length, layers), 1
    else:
        recomputed = layers
    ends = {min(start + length, layers) - 1 for start in range(0, recomputed, length)}
    is_last = model.hidden_dropout == 0.0 and model.norm_placement == "pre" and not model.hidden_size_per_layer_input
    return recomputed, ends if is_last else set()
