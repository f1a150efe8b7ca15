"""The quantisers of one linear layer: of its input, its weight and the gradient of its output."""

from __future__ import annotations

import torch

from megatron.core.collectives import all_reduce
from megatron.core.fp8.float8_recipe import OPERANDS, Float8Recipe
from megatron.core.fp8.float8_state import Float8State
from megatron.core.kernels.float8.quantised import (
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    Quantised,
    amax_of,
    quantise,
    quantise_whole,
    scale_of,
)
from megatron.core.process_group import Group


class Float8Quantisers:
    """Quantise the operands of one linear layer as a recipe says; ``place`` is the layer's in the state.

    A product sums along the rows of its operands, so that each is quantised along its own rows: with blocks that are
    not square, a matrix and its transpose are rounded differently.
    """

    def __init__(self, recipe: Float8Recipe, state: Float8State | None = None, place: tuple[int, int] = (0, 0)) -> None:
        self.recipe = recipe
        self.input_is_recomputed = False
        """Whether what the layer saves of its input is made anew in the backward pass, if it is saved as it came."""
        self._state = state
        self._place = place

    @property
    def turns(self) -> bool:
        """Return whether the transpose of a quantised input or gradient is the quantised transpose."""
        return self.recipe.blocks == WHOLE

    @property
    def gathers_gradients(self) -> bool:
        """Return whether a gradient whose parts ranks hold travels in fp8.

        Where its transpose is rounded on its own, both would be as many bytes as the gradient in 16 bits.
        """
        return self.turns and self.recipe.has_weight_gradients

    @property
    def keeps_weight_scale(self) -> bool:
        """Return whether a weight's transpose has the scales of the weight."""
        return self.recipe.weight_blocks in (WHOLE, SQUARES_OF_128)

    def matrix(
        self, operand: str, x: torch.Tensor, *, transpose: bool, records: bool, group: Group | None = None
    ) -> tuple[Quantised, Quantised | None]:
        """Return an input or a gradient quantised along its rows, and with ``transpose`` along its columns too.

        ``records`` lets delayed scaling see it. The ranks of ``group`` hold parts of one matrix, cut along its rows,
        and find the same scales where these are of parts that they share.

        Shapes: ``x: [n, m] -> [n, m], [m, n]``.
        """
        dtype, blocks = self.recipe.dtype(operand), self.recipe.blocks
        if blocks == WHOLE:
            scale, amax = self._scale(operand, x, group, records)
            plain, turned = quantise_whole(x, dtype, scale, amax, transpose=transpose)
            assert plain is not None
            return plain, turned
        return quantise(x, dtype, blocks), self.columns(operand, x, group) if transpose else None

    def columns(self, operand: str, x: torch.Tensor, group: Group | None = None) -> Quantised:
        """Return the transpose of an input or a gradient, quantised along its rows, where these have scales.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        dtype, blocks = self.recipe.dtype(operand), self.recipe.blocks
        turned = x.t()
        scale = None
        if blocks.columns == 0 and group is not None:
            scale = scale_of(_shared_amax(turned, blocks, group), dtype)
        return quantise(turned, dtype, blocks, scale)

    def input_again(
        self, x: torch.Tensor, scale: torch.Tensor | None, transpose: bool, group: Group | None
    ) -> Quantised:
        """Return an input, or with ``transpose`` its transpose, quantised as `matrix` did.

        ``scale`` is that of the first time where a whole matrix has one; without it the transpose is meant.

        Shapes: ``x: [n, m] -> [n, m]``, transposed ``[m, n]``.
        """
        if scale is None:
            return self.columns("input", x, group)
        dtype = self.recipe.dtype("input")
        plain, turned = quantise_whole(x, dtype, scale, None, plain=not transpose, transpose=transpose)
        quantised = turned if plain is None else plain
        assert quantised is not None
        return quantised

    def weight(self, x: torch.Tensor, *, transpose: bool, records: bool, scale: torch.Tensor | None) -> Quantised:
        """Return a weight, or its transpose, quantised along its rows.

        ``scale`` is what the weight was quantised by before, where that is known.

        Shapes: ``x: [n, m] -> [n, m]``, transposed ``[m, n]``.
        """
        dtype, blocks = self.recipe.dtype("weight"), self.recipe.weight_blocks
        if blocks == WHOLE:
            amax = None
            if scale is None:
                scale, amax = self._scale("weight", x, None, records)
            plain, turned = quantise_whole(x, dtype, scale, amax, plain=not transpose, transpose=transpose)
            quantised = turned if plain is None else plain
            assert quantised is not None
            return quantised
        if blocks == SQUARES_OF_128:
            quantised = quantise(x, dtype, blocks, scale)
            return quantised.transposed() if transpose else quantised
        return quantise(x.t() if transpose else x, dtype, blocks)

    def _scale(
        self, operand: str, x: torch.Tensor, group: Group | None, records: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale of a whole matrix, and where its amax is to be noted."""
        state, index = self._state, (*self._place, OPERANDS.index(operand))
        seen = state.amax[index] if state is not None and records else None
        if state is not None and state.has_history:
            return state.scale[index].view(1, 1), seen
        # The first step has no history: it scales by what it sees.
        return scale_of(_shared_amax(x, WHOLE, group), self.recipe.dtype(operand)), seen


def _shared_amax(x: torch.Tensor, blocks: Blocks, group: Group | None) -> torch.Tensor:
    amax = amax_of(x, blocks)
    if group is not None:
        all_reduce(amax, group, "max")
    return amax
