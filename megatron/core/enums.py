"""ModelType under megatron-core's name."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """Kind of model."""

    encoder_or_decoder = 1
