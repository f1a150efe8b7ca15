"""The low-rank adapters that a checkpoint holds beside its model, and the rows of the weights that they adapt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import config_from_dict
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.lora_targets import GATE_UP, QUERY_KEY_VALUE, WHOLE
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.huggingface.tensor_link import query_key_value_rows

_DOWN = re.compile(r"(model\..+)\.adapters\.(\w+)\.lora_A")
NO_ADAPTERS: dict[str, Any] = {"lora_rank": 0, "lora_alpha": 16.0, "lora_target_modules": [], "lora_dropout": 0.0}
"""What a model's configuration has where it has no adapters."""


@dataclass(frozen=True)
class RowRange:
    """Pair ``count`` rows of one tensor with as many of another."""

    first: int
    second: int
    count: int


@dataclass(frozen=True)
class StoredAdapter:
    """Name one adapter: the weight that it adapts, the part of its rows, and its own tensors.

    Where the weight stacks those of experts, so do these tensors. ``rows`` pair rows of the weight with rows of ``B``.
    """

    weight: str
    part: str
    rows: tuple[RowRange, ...]

    @property
    def down(self) -> str:
        """Return the name of ``A``."""
        return tensor_name(self.weight, self.part, "lora_A")

    @property
    def up(self) -> str:
        """Return the name of ``B``."""
        return tensor_name(self.weight, self.part, "lora_B")


def model_config(source: CheckpointSource) -> GPTConfig:
    """Return the model that a checkpoint's configuration describes.

    Raises:
        ConfigurationError: it is no configuration of a model.
    """
    return config_from_dict(GPTConfig, source.common["config"]["model"])


def tensor_name(weight: str, part: str, tensor: str) -> str:
    """Return the name of a tensor of the adapter of a part of a weight."""
    return f"{weight.removesuffix('.weight')}.adapters.{part}.{tensor}"


def part_rows(config: GPTConfig, part: str, num_rows: int) -> tuple[RowRange, ...]:
    """Return which rows of a weight with ``num_rows`` a part is, and where they are in the part."""
    if part == WHOLE:
        return (RowRange(0, 0, num_rows),)
    if part in GATE_UP:
        width = num_rows // len(GATE_UP)
        return (RowRange(GATE_UP.index(part) * width, 0, width),)
    assert part in QUERY_KEY_VALUE, f"a linear layer has no part {part}"
    fused = query_key_value_rows(config.num_attention_heads, config.num_query_groups, config.kv_channels)
    return tuple(RowRange(start, part_start, count) for kind, start, part_start, count in fused if kind == part)


def stored_adapters(source: CheckpointSource, config: GPTConfig) -> Iterator[StoredAdapter]:
    """Yield the adapters of a checkpoint in the order of its names; none where it has none."""
    for name in source.tensors:
        match = _DOWN.fullmatch(name)
        if match is not None:
            weight = f"{match[1]}.weight"
            # Of weights of experts, which are stacked, the rows are those of each.
            num_rows = source.tensors[weight].global_shape[-2]
            yield StoredAdapter(weight, match[2], part_rows(config, match[2], num_rows))
