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
from megatron.core.ops.fp8_tensor import Quantized
from megatron.core.ops.nvfp4_tensor import Nvfp4Matrix, amaxes, quantize_segments, quantize_squares
from megatron.core.process_group import Group

_MATRICES = 2
"""Matrices per gradient that are rounded: the gradient and its transpose."""
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
        plain, *turned = self._segments(operand, x, group, plain=True, transpose=transpose)
        return plain, turned[0] if turned else None

    def columns(self, operand: str, x: torch.Tensor, group: Group | None = None) -> Quantized:
        """Return the transpose of an input or gradient, transformed and quantized along its rows.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        (turned,) = self._segments(operand, x, group, plain=False, transpose=True)
        return turned

    def input_again(
        self, x: torch.Tensor, scale: torch.Tensor | None, transpose: bool, group: Group | None
    ) -> Quantized:
        """Return the transpose of an input quantized like in `matrix`.

        Shapes: ``x: [n, m] -> [m, n]``.
        """
        assert scale is None, "scales of NVFP4 are computed again"
        assert transpose, "parts are gathered after they are transposed"
        return self.columns("input", x, group)

    def _weight(
        self, x: torch.Tensor, scale: torch.Tensor | None, *, plain: bool, transpose: bool, records: bool
    ) -> list[Quantized]:
        return [*quantize_squares(x, plain=plain, transpose=transpose)]

    def _segments(
        self, operand: str, x: torch.Tensor, group: Group | None, *, plain: bool, transpose: bool
    ) -> list[Nvfp4Matrix]:
        amax = amaxes(x, plain=plain, transpose=transpose)
        if group is not None:
            all_reduce(amax, group, "max")
        sites = range(self._first_site + (not plain), self._first_site + 1 + transpose)
        return quantize_segments(x, amax, self._random(operand, x, sites), plain=plain, transpose=transpose)

    def _random(self, operand: str, x: torch.Tensor, sites: range) -> tuple[RowKeys, torch.Tensor] | None:
        """Return the keys of a gradient's sites and its columns, and None for an input.

        Shapes: ``x: [n, m] -> [sites, n], [m]``.

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
        return self.keys.of_rounding(sites, len(x)), self._columns
