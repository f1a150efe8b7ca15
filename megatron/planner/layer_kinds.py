"""What the layers of a model differ in, as far as memory and time follow from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents


class LayerKind(NamedTuple):
    """Say whether a layer's products are in fp8, whether it has experts, to how many keys a query looks back at most,
    its own among them, whether --no-rope-freq leaves it its rotary positions, by which exchange context-parallel ranks
    share keys and values, and whether it predicts a further token, behind the model.
    """

    in_float8: bool
    has_experts: bool
    window: int
    has_rotary: bool
    exchange: str
    is_further: bool = False


def layer_kinds(model: GPTConfig, seq_length: int) -> Sequence[LayerKind]:
    """Return the kind of every layer, those that predict further tokens behind the others."""
    exchanges = model.cp_comm_type if model.context_parallel_size > 1 else ("",)
    float8_layers = tuple(model.float8_layers(model.num_layers))
    without_rotary = model.layers_without_rotary
    own = _kinds(float8_layers, model.moe_layers, model.layer_windows, without_rotary, tuple(exchanges), seq_length)
    further = own[-1]._replace(in_float8=model.is_in_float8(model.num_layers, model.num_layers), is_further=True)
    return [*own, *[further] * model.num_further_tokens] if model.num_further_tokens else own


def layer_numbers(model: GPTConfig, chunk: StageContents) -> tuple[int, ...]:
    """Return the numbers of a chunk's layers, and behind them those of the layers that predict further tokens."""
    further = model.num_further_tokens if chunk.has_loss else 0
    return (*chunk.layer_numbers, *range(model.num_layers, model.num_layers + further))


# A search asks for the same layers thousands of times.
@functools.lru_cache(maxsize=1024)
def _kinds(
    float8_layers: tuple[int, ...],
    has_experts: tuple[bool, ...],
    windows: tuple[int | None, ...],
    without_rotary: tuple[bool, ...],
    exchanges: tuple[str, ...],
    seq_length: int,
) -> Sequence[LayerKind]:
    return [
        LayerKind(
            in_float8=number in float8_layers,
            has_experts=has,
            window=min(window or seq_length, seq_length),
            has_rotary=not is_without,
            exchange=exchanges[0 if len(exchanges) == 1 else number],
        )
        for number, (has, window, is_without) in enumerate(zip(has_experts, windows, without_rotary, strict=True))
    ]
