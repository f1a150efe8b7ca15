"""Enumerations under megatron-core's names."""

from __future__ import annotations

import enum

from megatron.core.enums import ModelType as ModelType


class LayerType(enum.Enum):
    """Kind of layer in a pipeline layout."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(enum.Enum):
    """Kind of attention."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Which positions a query attends to."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """Kernel of attention."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
