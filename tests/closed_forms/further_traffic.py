"""What the layers send that predict further tokens, beside what every transformer layer sends."""

from __future__ import annotations

from megatron.core.transformer.decoder_config import DecoderConfig
from tests.closed_forms.float8_traffic import Add, Float8LayerEnds


def add_further(
    add: Add, model: DecoderConfig, tokens: int, hidden_bytes: int, microbatches: int, *, runs_again: bool
) -> None:
    """Add what their embedded tokens, and the products that join these to the states, send for so many micro-batches.

    ``hidden_bytes`` are those of the hidden states of the whole group's ``tokens``. ``runs_again`` counts what is
    computed a second time.
    """
    number = model.mtp.mtp_depth
    backward = number * microbatches
    forward = backward * (2 if runs_again else 1)
    # Every rank has a part of the columns, and the layer wants all.
    add("all_gather", hidden_bytes, forward)
    if not model.sequence_parallel:
        add("all_reduce", number * hidden_bytes, microbatches)
        add("all_reduce", 2 * hidden_bytes, backward)
        return
    add("reduce_scatter", number * hidden_bytes, microbatches)
    add("all_gather", number * hidden_bytes, microbatches)
    if model.fp8.fp8_format is not None:
        Float8LayerEnds(model, tokens, hidden_bytes).add_join(add, forward, backward)
    else:
        # Gathered for the product, and once more for the gradient of its weight.
        add("all_gather", 2 * hidden_bytes, forward + backward)
        add("reduce_scatter", 2 * hidden_bytes, backward)
    # The gradient of what was cut along the sequence again.
    add("all_gather", hidden_bytes, backward)
