"""A training on one process whose sums are those of two tensor-parallel ranks: of halves, each of which is rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.ops.cross_entropy import normalizer_and_label_logits, overwrite_with_gradient
from megatron.core.ops.fp8_tensor import Quantized
from megatron.core.tensor_parallel import cross_entropy, float8_linear
from megatron.core.tensor_parallel import layers as linear
from megatron.core.tensor_parallel.mappings import InputRegion
from tests.harness.faults import Faults, run_with_faults

Cut = Callable[[Any], tuple[Any, Any]]


class _NextProduct:
    """Compute the first product after `sums_over_ranks` was set as the sum of two, and others as they are."""

    def __init__(self, product: Callable[..., torch.Tensor], cut: Cut) -> None:
        self._product, self._cut = product, cut
        self.sums_over_ranks = False

    def __call__(self, left: Any, right: Any, *args: Any, **options: Any) -> torch.Tensor:
        if not self.sums_over_ranks:
            return self._product(left, right, *args, **options)
        self.sums_over_ranks = False
        (left, other_left), (right, other_right) = self._cut(left), self._cut(right)
        of_first = self._product(left, right, *args, **options)
        without_bias = [None if position == 1 else value for position, value in enumerate(args)]
        return of_first + self._product(other_left, other_right, *without_bias, **options)

    def in_forward(self, forward: Callable[..., Any]) -> staticmethod[..., Any]:
        """Sum the product of a row-parallel layer's forward pass."""

        def run(ctx: Any, x: Any, weight: Any, bias: Any, region: InputRegion, *others: Any) -> Any:
            self.sums_over_ranks = region is InputRegion.SPLIT
            return forward(ctx, x, weight, bias, region, *others)

        return staticmethod(run)

    def in_backward(self, backward: Callable[..., Any]) -> staticmethod[..., Any]:
        """Sum the input's gradient of a column-parallel layer."""

        def run(ctx: Any, grad: torch.Tensor) -> Any:
            self.sums_over_ranks = ctx.region is InputRegion.REPLICATED
            return backward(ctx, grad)

        return staticmethod(run)


def _cut_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first.contiguous(), second.contiguous()


def _cut_quantized(x: Quantized) -> tuple[Quantized, Quantized]:
    first, second = (dataclasses.replace(x, data=part) for part in _cut_columns(x.data))
    return first, second


class _LossOfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, *others: Any) -> torch.Tensor:
        flat = logits.detach().reshape(-1, logits.shape[-1])
        half, num_columns = flat.shape[1] // 2, others[1]
        ctx.parts = [
            (part, labels.reshape(-1) - start, min(half, num_columns - start))
            for start, part in zip((0, half), _cut_columns(flat))
        ]
        found = [normalizer_and_label_logits(*part) for part in ctx.parts]
        ctx.normalizers = [normalizer for normalizer, _ in found]
        largest = torch.maximum(*ctx.normalizers)
        first, second = ((normalizer - largest).exp() for normalizer in ctx.normalizers)
        ctx.whole, ctx.shape = (first + second).log().add(largest), logits.shape
        return (ctx.whole - (found[0][1] + found[1][1])).reshape(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_grad = grad.reshape(-1).to(ctx.whole.dtype)
        for (part, labels, num_columns), normalizer in zip(ctx.parts, ctx.normalizers):
            overwrite_with_gradient(part, labels, num_columns, normalizer, ctx.whole, row_grad)
        return torch.cat([part for part, _, _ in ctx.parts], dim=1).view(ctx.shape), *(None,) * 5


def run_with_sums_in_halves(argv: Sequence[str], faults: Faults) -> int:
    """Train with delayed scaling on one process as two tensor-parallel ranks without sequence parallelism would."""
    of_layers = _NextProduct(float8_linear.scaled_product, _cut_quantized)
    of_logits = _NextProduct(linear.linear, _cut_columns)
    layers, logits = float8_linear._Float8Linear, linear._Linear
    with (
        patch.object(float8_linear, "scaled_product", of_layers),
        patch.object(layers, "forward", of_layers.in_forward(layers.forward)),
        patch.object(layers, "backward", of_layers.in_backward(layers.backward)),
        patch.object(linear, "linear", of_logits),
        patch.object(logits, "backward", of_logits.in_backward(logits.backward)),
        patch.object(cross_entropy, "_VocabParallelCrossEntropy", _LossOfHalves),
    ):
        return run_with_faults(argv, faults)
