"""How each operand of a linear layer's products is quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.core.fp8.float8_config import Float8Config
from megatron.core.kernels.float8.quantised import (
    E4M3,
    E5M2,
    ROWS,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
)

OPERANDS = ("input", "weight", "grad")
"""What the three products of a linear layer are made of; ``grad`` is the gradient of the output."""

_BLOCKS: Mapping[str, Blocks] = {
    "delayed": WHOLE,
    "tensorwise": WHOLE,
    "rowwise": ROWS,
    "blockwise": SEGMENTS_OF_128,
    "mxfp8": SEGMENTS_OF_32,
}
_GRAD_DTYPES = {"e4m3": E4M3, "hybrid": E5M2}


@dataclass(frozen=True)
class Float8Recipe:
    """Hold a recipe of fp8: what shares a scale, the format of gradients, and which products are in fp8.

    ``is_delayed`` says that scales are those of earlier steps. Without ``has_weight_gradients`` those are computed in
    the model's own precision.
    """

    blocks: Blocks
    weight_blocks: Blocks
    grad_dtype: torch.dtype
    is_delayed: bool
    has_weight_gradients: bool

    @classmethod
    def of(cls, config: Float8Config) -> Float8Recipe:
        """Return the recipe that a configuration asks for."""
        blocks = _BLOCKS[config.fp8_recipe]
        return cls(
            blocks=blocks,
            weight_blocks=SQUARES_OF_128 if blocks == SEGMENTS_OF_128 else blocks,
            grad_dtype=_GRAD_DTYPES[config.fp8_format or "e4m3"],
            is_delayed=config.fp8_recipe == "delayed",
            has_weight_gradients=config.fp8_wgrad,
        )

    def dtype(self, operand: str) -> torch.dtype:
        """Return the format of an operand."""
        return self.grad_dtype if operand == "grad" else E4M3
