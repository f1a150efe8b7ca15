"""Tensors that layers read in addition to hidden states: per-layer inputs, and keys and values of earlier layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class SharedTensors:
    """Tensors of one micro-batch that the layers of a model share.

    ``per_layer`` has the input of each layer by --hidden-size-per-layer-input, and is empty without it. ``new`` has the
    keys and values of new positions by the number of the layer that computed them, and ``all`` those of new and cached
    positions.

    Shapes: ``per_layer: [s, b, d]`` each (``[s/tp, b, d]`` under sequence parallelism); keys and values
    ``[s, b, groups/tp, d]``.
    """

    per_layer: tuple[torch.Tensor, ...] = ()
    new: dict[int, KeyValue] = field(default_factory=dict)
    all: dict[int, KeyValue] = field(default_factory=dict)

    def copy(self) -> SharedTensors:
        """Return a copy to which layers add keys and values without a change of this object."""
        return replace(self, new=dict(self.new), all=dict(self.all))

    def add(self, other: SharedTensors) -> None:
        """Add the keys and values of another object."""
        self.new.update(other.new)
        self.all.update(other.all)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that come from before the layers."""
        yield from self.per_layer
        for pair in self.all.values():
            yield from pair


def split_inputs(per_layer: torch.Tensor, config: DecoderConfig) -> tuple[torch.Tensor, ...]:
    """Return the input of each layer, given all of them side by side. Shapes: ``[s, b, layers * d] -> [s, b, d]``."""
    return per_layer.chunk(config.num_layers, dim=-1) if config.hidden_size_per_layer_input else ()


def write_message(hidden: torch.Tensor, shared: SharedTensors, config: DecoderConfig) -> torch.Tensor:
    """Return the message to the next pipeline stage: hidden states and shared tensors side by side.

    Keys and values that no layer has computed yet are zeros. Under sequence parallelism keys and values of ``tp``
    positions are in one row.

    Shapes: ``hidden: [s, b, h] -> [s, b, width]`` of `DecoderConfig.message_widths`.
    """
    parts = [hidden, *shared.per_layer]
    rows, batch, _ = hidden.shape
    _, _, *widths = config.message_widths
    for source, width in zip(config.shared_key_values, widths, strict=True):
        if source in shared.new:
            both = torch.cat([each.flatten(2) for each in shared.new[source]], dim=-1)
            parts.append(both.view(rows, -1, *both.shape[1:]).transpose(1, 2).reshape(rows, batch, width))
        else:
            parts.append(hidden.new_zeros((rows, batch, width)))
    return torch.cat(parts, dim=-1)


def read_message(
    message: torch.Tensor, config: DecoderConfig, layer_numbers: Sequence[int], cache: KeyValueCache | None
) -> tuple[torch.Tensor, SharedTensors]:
    """Return the hidden states and the shared tensors in a message to the stage with these layers.

    A cache receives the keys and values of the new positions, under the first layer that uses them.
    """
    rows, batch, _ = message.shape
    parts = message.split_with_sizes(config.message_widths, dim=-1)
    hidden, per_layer, *key_values = (part.contiguous() for part in parts)
    shared = SharedTensors(split_inputs(per_layer, config))
    first, positions = min(layer_numbers, default=config.num_layers), config.positions_per_message_row
    for source, both in zip(config.shared_key_values, key_values, strict=True):
        if source >= first:
            continue
        in_order = both.view(rows, batch, positions, -1).transpose(1, 2)
        heads = in_order.reshape(rows * positions, batch, 2, -1, config.of_layer(source).kv_channels)
        key, value = (half.contiguous() for half in heads.unbind(2))
        shared.new[source] = shared.all[source] = key, value
        users = [number for number in layer_numbers if config.key_value_sources[number] == source]
        if cache is not None and users:
            shared.all[source] = cache.update(users[0], key, value)
    return hidden, shared
