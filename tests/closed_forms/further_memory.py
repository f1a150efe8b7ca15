"""What a layer that predicts a further token keeps beside its transformer layer, in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.transformer.decoder_config import DecoderConfig
from tests.closed_forms.kept_inputs import is_in_float8, kept_input
from tests.closed_forms.norm_memory import norm_numbers


def kept_by_join(
    config: DecoderConfig, layer_number: int | None, rows: int, element: int, *, is_plain: bool = False
) -> Mapping[str, int]:
    """Return by part what is kept around a layer of this number, of ``rows`` of the residual stream.

    Nothing is, unless it stands behind the model. There the states before it and the embedded tokens are normalized and
    multiplied side by side, and what it gives is normalized. ``is_plain`` says that norms are made of plain operations.
    """
    if layer_number is None or layer_number < config.num_layers:
        return {}
    hidden = rows * config.hidden_size
    if config.recompute_granularity == "full":
        return {"embedded tokens": hidden * element}
    # A fused norm keeps its input, one of plain operations that in float32 and what it is before its weight.
    of_norm = max(element, 4) + element if is_plain else element
    widths = config.hidden_size // config.tensor_model_parallel_size, 2 * config.hidden_size
    in_float8 = is_in_float8(config, layer_number)
    joined = kept_input(config, "eh_proj", rows, widths, in_float8=in_float8, is_recomputed=False)
    return {
        "norms of the join": 3 * (hidden * of_norm + rows * norm_numbers(config) * max(element, 4)),
        "joined": 2 * hidden * element * joined.is_whole + joined.rounded + joined.scales,
    }
