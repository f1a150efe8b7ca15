"""How fast a device computes: products by shape, attention forward and backward, and passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron.core.device import Device
from megatron.doctor.bandwidth import measure_host_copies, time_work

_HEADS = 16
_ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass beside those of its forward pass."""
_REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """Hold what is measured on a kind of device: product shapes ``[rows, inner] x [inner, columns]``, and lengths."""

    products: tuple[tuple[int, int, int], ...]
    attention_length: int
    copied_bytes: int


ON_GPU = Sizes(((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192)), 8192, 1 << 30)
ON_CPU = Sizes(((512, 512, 512), (1024, 512, 2048), (1024, 2048, 512), (1024, 1024, 1024)), 512, 1 << 27)


@dataclass(frozen=True)
class Rates:
    """Hold what was measured; products are in operations a second by shape, attention by the size of a head."""

    half_products: dict[tuple[int, int, int], float]
    single_products: dict[tuple[int, int, int], float]
    attention_forward: dict[int, float]
    attention_backward: dict[int, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float


def measure_rates(device: Device, sizes: Sizes) -> Rates:
    """Return the rates of a device; it takes seconds on a GPU and less than a minute on two cores."""
    attention = {size: _attention(device, sizes.attention_length, size) for size in (64, 128)}
    copies = measure_host_copies(device, sizes.copied_bytes)
    return Rates(
        half_products={shape: _product(device, shape, torch.bfloat16) for shape in sizes.products},
        single_products={shape: _product(device, shape, torch.float32) for shape in sizes.products},
        attention_forward={size: rates[0] for size, rates in attention.items()},
        attention_backward={size: rates[1] for size, rates in attention.items()},
        memory_bytes_per_s=_memory(device, sizes.copied_bytes),
        host_bytes_per_s=min(copy.bus_bytes_per_s for copy in copies.values()),
    )


def _product(device: Device, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device.torch_device, dtype=dtype)
    right = torch.randn(inner, columns, device=device.torch_device, dtype=dtype)
    return 2.0 * rows * inner * columns / time_work(partial(torch.matmul, left, right), device, repeats=_REPEATS)


def _attention(device: Device, length: int, head_size: int) -> tuple[float, float]:
    """Return the operations a second of causal attention, forward and backward."""
    shape = 1, _HEADS, length, head_size
    query, key, value = (
        torch.randn(shape, device=device.torch_device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    attend: Callable[[], torch.Tensor] = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
    forward = time_work(attend, device, repeats=_REPEATS)
    gradient = torch.randn(shape, device=device.torch_device, dtype=torch.bfloat16)
    both = time_work(lambda: torch.autograd.grad(attend(), (query, key, value), gradient), device, repeats=_REPEATS)
    flops = 2.0 * _HEADS * length**2 * head_size
    return flops / forward, _ATTENTION_BACKWARD * flops / max(both - forward, forward / 100)


def _memory(device: Device, num_bytes: int) -> float:
    """Return the bytes that a simple kernel reads and writes in a second."""
    source = torch.zeros(num_bytes // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / time_work(partial(torch.add, source, 1.0, out=target), device, repeats=_REPEATS)
