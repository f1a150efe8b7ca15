"""Quantization of a linear layer's operands by NVIDIA's recipe for NVFP4 (2025, https://arxiv.org/abs/2509.25149).

Weights have a scale per 16 × 16 elements, so that both passes multiply by the same numbers. Inputs and gradients have a
scale per 16 elements along the summed dimension. Gradients are rounded stochastically. Both operands of the weight
gradient are transformed by a random Hadamard matrix along the tokens.
"""

from __future__ import annotations

import copy

import torch

from megatron.core.collectives import all_reduce
from megatron.core.errors import ConfigurationError
from megatron.core.ops.dropout import DropoutKeys, RowKeys
from megatron.core.ops.fp8_quantizers import Float8Recipe, Fp8Quantizers
from megatron.core.ops.fp8_tensor import SQUARES_OF_16, Quantized
from megatron.core.ops.nvfp4_tensor import Nvfp4Matrix, Segmented, quantize_nvfp4, tensor_scale_of
from megatron.core.process_group import Group

_PLAIN, _TURNED = 0, 1
_MATRICES = 2
_LINEAR_OF_A_LAYER = 64


class Nvfp4Quantizers(Fp8Quantizers):
    """Quantize the operands of one linear layer to NVFP4.

    ``place`` is the layer's index, with which random numbers are drawn. ``columns`` are the indices of this rank's
    output features among all of the layer. ``keys`` are the keys of the micro-batch, which the transformer layer sets
    before each forward pass.
    """

    def __init__(self, recipe: Float8Recipe, place: tuple[int, int], columns: torch.Tensor) -> None:
        super().__init__(recipe, None, place)
        self.keys: DropoutKeys | None = None
        self._columns = columns
        layer_number, number = place
        assert number < _LINEAR_OF_A_LAYER
        self._first_site = _MATRICES * (_LINEAR_OF_A_LAYER * layer_number + number)

    def of_microbatch(self) -> Nvfp4Quantizers:
        """Return quantizers that keep the keys of this micro-batch, while other micro-batches pass the layer."""
        return copy.copy(self)

    def matrix(
        self, operand: str, x: torch.Tensor, *, transpose: bool, records: bool, group: Group | None = None
    ) -> tuple[Quantized, Quantized | None]:
        """Return an input or gradient quantized along its rows, and with ``transpose`` also along its columns.

        The ranks of ``group`` hold row shards of one matrix, and compute the same tensor scales.

        Shapes: ``x: [n, m] -> [n, m], [m, n]``.
        """
        sides = (_PLAIN, _TURNED) if transpose else (_PLAIN,)
        matrices = [Segmented(x, side == _TURNED) for side in sides]
        amax = _shared(torch.stack([each.amax() for each in matrices]), group)
        plain, *turned = (
            each.quantized(tensor_scale_of(own), self._random(operand, x, side))
            for each, own, side in zip(matrices, amax, sides)
        )
        return plain, turned[0] if turned else None

    def columns(self, operand: str, x: torch.Tensor, group: Group | None = None) -> Quantized:
        """Return the transpose of an input or gradient, transformed and quantized along its rows.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        turned = Segmented(x, True)
        return turned.quantized(tensor_scale_of(_shared(turned.amax(), group)), self._random(operand, x, _TURNED))

    def input_again(
        self, x: torch.Tensor, scale: torch.Tensor | None, transpose: bool, group: Group | None
    ) -> Quantized:
        """Return the transpose of an input quantized like in `matrix`.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        assert scale is None, "scales of NVFP4 are computed again"
        assert transpose, "parts are gathered after they are transposed"
        return self.columns("input", x, group)

    def weight(self, x: torch.Tensor, *, transpose: bool, records: bool, scale: torch.Tensor | None) -> Nvfp4Matrix:
        """Return a weight, or its transpose; both have the same values.

        Shapes: ``x: [n, m] -> [n, m]``, transposed ``[m, n]``.
        """
        quantized = quantize_nvfp4(x, SQUARES_OF_16)
        return quantized.transposed() if transpose else quantized

    def _random(self, operand: str, x: torch.Tensor, side: int) -> tuple[RowKeys, torch.Tensor] | None:
        """Return the keys and the columns of a gradient or of its transpose, and None for an input.

        Shapes: ``x: [n, m] -> [n], [m]``.

        Raises:
            ConfigurationError: the layer was called without keys.
        """
        if operand != "grad":
            return None
        if self.keys is None:
            raise ConfigurationError(
                "layers with --fp4-format round gradients stochastically, but were called in training without keys: "
                "pass keys_of_rank(batch.dropout_samples, ...) to the transformer block"
            )
        return self.keys.of_rounding(self._first_site + side, len(x)), self._columns


def _shared(amax: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Return the maximum over a group that holds row shards of one matrix."""
    if group is not None:
        all_reduce(amax, group, "max")
    return amax
