"""What the layers of a model differ in, as far as memory and time follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.models.gpt.gpt_config import GPTConfig


class LayerKind(NamedTuple):
    """Say whether a layer's products are in fp8, whether it has experts, to how many keys a query looks back at most,
    its own among them, and by which exchange context-parallel ranks share keys and values.
    """

    in_float8: bool
    has_experts: bool
    window: int
    exchange: str


def layer_kinds(model: GPTConfig, seq_length: int) -> Sequence[LayerKind]:
    """Return the kind of every layer."""
    float8_layers, has_ranks = model.float8_layers(model.num_layers), model.context_parallel_size > 1
    return [
        LayerKind(
            in_float8=number in float8_layers,
            has_experts=has_experts,
            window=min(window or seq_length, seq_length),
            exchange=model.cp_exchange(number) if has_ranks else "",
        )
        for number, (has_experts, window) in enumerate(zip(model.moe_layers, model.layer_windows, strict=True))
    ]
