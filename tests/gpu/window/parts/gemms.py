"""Part 2: every distinct GEMM of the models, forward and backward, in bf16 and FP8, and those of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron.core.ops.fp8_tensor import E4M3, WHOLE, device_product, quantize
from megatron.core.ops.gemm import RowCounts, add_wide_product, adds_wide_products, grouped_gradient, grouped_product
from tests.gpu.window.clock import KernelClock
from tests.gpu.window.parts.environment import why_no_float8
from tests.gpu.window.shapes import GemmShape, grouped_layers, linear_layers, shapes_of
from tests.gpu.window.window import Unsupported, Window

_SMALL_GROUPS = (2, 4)


def run(window: Window) -> None:
    """Time each shape; the name of a finding is that of its prediction."""
    shapes = shapes_of(small=window.small)
    clock = KernelClock(window.place, small=window.small)
    groups = grouped_layers(shapes, _SMALL_GROUPS) if window.small else grouped_layers(shapes)
    for shape in (*linear_layers(shapes), *groups):
        if not window.is_time_for(f"GEMMs of {shape.name}", 0.5):
            continue
        with window.attempt(f"GEMMs of {shape.name}"):
            for name, work in _grouped(window, shape) if shape.groups else _dense(window, shape):
                with window.attempt(name):
                    milliseconds = clock.milliseconds(work)
                    flops = 2.0 * shape.tokens * shape.inner * shape.outer
                    rate = flops / max(milliseconds, 1e-9) / 1e9
                    size = f"{shape.tokens} x {shape.inner} x {shape.outer}"
                    window.value(name, milliseconds, "ms", key=name, tokens_inner_outer=size, tflops=rate)


def _operands(window: Window, shape: GemmShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random inputs, weights and output gradients: zeros would draw less power and be faster."""
    generator = torch.Generator(window.place).manual_seed(4)
    of_weight = (shape.groups, shape.outer, shape.inner) if shape.groups else (shape.outer, shape.inner)
    sizes = ((shape.tokens, shape.inner), of_weight, (shape.tokens, shape.outer))
    x, weight, grad = (
        torch.randn(size, generator=generator, device=window.place, dtype=torch.bfloat16) for size in sizes
    )
    return x, weight, grad


def _dense(window: Window, shape: GemmShape) -> Iterator[tuple[str, Callable[[], object]]]:
    x, weight, grad = _operands(window, shape)
    yield f"{shape.name}, forward, bf16", lambda: torch.mm(x, weight.t())
    yield f"{shape.name}, input gradient, bf16", lambda: torch.mm(grad, weight)
    if adds_wide_products(torch.bfloat16, torch.float32, window.place):
        total = torch.zeros(shape.outer, shape.inner, device=window.place)
        yield (
            f"{shape.name}, weight gradient, fp32 sums",
            lambda: add_wide_product(total, grad.t(), x, overwrite=False),
        )
    else:
        yield f"{shape.name}, weight gradient, bf16", lambda: torch.mm(grad.t(), x)
    name = f"{shape.name}, forward, FP8"
    with window.attempt(name):
        if (reason := why_no_float8(window.capability, WHOLE)) is not None:
            raise Unsupported(reason)
        left, right = quantize(x, E4M3, WHOLE), quantize(weight, E4M3, WHOLE)
        yield name, lambda: device_product(left, right, torch.bfloat16)


def _grouped(window: Window, shape: GemmShape) -> Iterator[tuple[str, Callable[[], object]]]:
    x, weight, grad = _operands(window, shape)
    each = shape.tokens // shape.groups
    counts = RowCounts([each] * (shape.groups - 1) + [shape.tokens - each * (shape.groups - 1)])
    yield f"{shape.name}, forward, grouped bf16", lambda: grouped_product(x, weight, counts)
    turned = weight.transpose(1, 2).contiguous()
    yield f"{shape.name}, input gradient, grouped bf16", lambda: grouped_product(grad, turned, counts)
    yield f"{shape.name}, weight gradient, grouped bf16", lambda: grouped_gradient(grad, x, counts)
