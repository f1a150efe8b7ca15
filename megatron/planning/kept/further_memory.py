"""What a layer that predicts a further token keeps beside its transformer layer, in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planning.kept.norm_memory import norm_numbers


def kept_by_join(
    config: TransformerConfig, layer_number: int | None, rows: int, element: int, *, is_plain: bool = False
) -> Mapping[str, int]:
    """Return by part what is kept around a layer of this number, of ``rows`` of the residual stream.

    Nothing is, unless it stands behind the model. There the states before it and the embedded tokens are normalised and
    multiplied side by side, and what it gives is normalised. ``is_plain`` says that norms are made of plain operations.
    """
    if layer_number is None or layer_number < config.num_layers:
        return {}
    hidden = rows * config.hidden_size
    if config.recompute_granularity == "full":
        return {"embedded tokens": hidden * element}
    # A fused norm keeps its input, one of plain operations that in float32 and what it is before its weight.
    of_norm = max(element, 4) + element if is_plain else element
    return {
        "norms of the join": 3 * (hidden * of_norm + rows * norm_numbers(config) * max(element, 4)),
        "joined": 2 * hidden * element,
    }
