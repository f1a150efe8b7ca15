"""Measure a device: matmul, attention, memory and copy rates, and the bandwidth of collectives."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron.core.collectives import (
    all_gather_into,
    all_gather_objects,
    all_reduce,
    barrier,
    reduce_scatter_into,
    start_ring_exchange,
)
from megatron.core.device import Device
from megatron.core.process_group import Group

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")
"""Operations measured over a group; in ``send`` every rank sends to the next and receives from the previous rank."""
REDUCING = ("all_reduce", "reduce_scatter")
"""Operations that take a reduction."""
REDUCTIONS = ("sum", "avg")
"""Reduction operators. Training runs use the sum; NVLink SHARP (NVLS) does not compute averages."""
_REPEATS = 5
_CUDA_LAUNCHES = 10
"""Calls timed together on CUDA, so that the queue hides the launch overhead."""


@dataclass(frozen=True)
class Bandwidth:
    """Time of one operation on ``num_bytes``: the size of the whole tensor, or of the data that one rank sends.

    ``bus_bytes_per_s`` is the traffic on each rank's links, comparable with their bandwidth.
    """

    operation: str
    num_bytes: int
    group_size: int
    seconds: float

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bytes that each rank sends or receives per second."""
        others = (self.group_size - 1) / self.group_size
        share = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others}.get(self.operation, 1.0)
        return self.num_bytes * share / self.seconds


def measure_collective(
    operation: str, num_bytes: int, group: Group, device: Device, reduction: str = "sum"
) -> Bandwidth:
    """Measure the bandwidth of an operation of ``OPERATIONS`` over a group; collective.

    Reductions use ``reduction``, one of ``REDUCTIONS``. The size is rounded down to whole float32 elements per rank.
    The time is the median over repeats on the slowest rank.
    """
    part = max(1, num_bytes // 4 // group.size)
    # Zeros, since repeated sums of other values would grow.
    whole = torch.zeros(part * group.size, device=device.torch_device)
    piece = torch.zeros(part, device=device.torch_device)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, group, reduction),
        "all_gather": lambda: all_gather_into(whole, piece, group),
        "reduce_scatter": lambda: reduce_scatter_into(piece, whole, group, reduction),
        "send": lambda: start_ring_exchange(whole, group).wait(),
    }
    seconds = time_work(work[operation], device, lambda: barrier(group))
    slowest = max(all_gather_objects(seconds, group))
    return Bandwidth(operation, whole.nbytes, group.size, slowest)


def measure_host_copies(device: Device, num_bytes: int) -> dict[str, Bandwidth]:
    """Measure the bandwidth of copies from host to device and from device to host."""
    on_host, on_device = device.empty_host_memory(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    on_device = on_device.to(device.torch_device)
    copies: dict[str, Callable[[], object]] = {
        "host to device": lambda: on_device.copy_(on_host, non_blocking=True),
        "device to host": lambda: on_host.copy_(on_device, non_blocking=True),
    }
    return {name: Bandwidth(name, num_bytes, 1, time_work(copy, device)) for name, copy in copies.items()}


def measure_peer_copies(devices: Sequence[Device], num_bytes: int) -> dict[tuple[int, int], Bandwidth]:
    """Measure the bandwidth of copies between all pairs of devices, by (source index, target index)."""
    found = {}
    for source in devices:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=source.torch_device)
        for target in devices:
            if source == target:
                continue
            copy = partial(torch.empty_like(data, device=target.torch_device).copy_, data, non_blocking=True)
            seconds = time_work(copy, target, source.synchronize)
            found[source.index, target.index] = Bandwidth("device to device", num_bytes, 1, seconds)
    return found


def time_work(
    work: Callable[[], object],
    device: Device,
    line_up: Callable[[], object] = lambda: None,
    repeats: int = _REPEATS,
) -> float:
    """Return the median time of a call in seconds, after one warm-up call.

    ``line_up`` runs before each repeat, for example a barrier.
    """
    times, count = [], _CUDA_LAUNCHES if device.is_cuda else 1
    for _ in range(repeats + 1):
        line_up()
        device.synchronize()
        times.append(device.time_calls(work, count) / count)
    return statistics.median(times[1:])


_HEADS = 16
_ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass relative to its forward pass."""
_RATE_REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """Problem sizes for a kind of device: matmul shapes ``[rows, inner] x [inner, columns]``, lengths and bytes."""

    products: tuple[tuple[int, int, int], ...]
    attention_length: int
    copied_bytes: int


ON_GPU = Sizes(((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192)), 8192, 1 << 30)
ON_CPU = Sizes(((512, 512, 512), (1024, 512, 2048), (1024, 2048, 512), (1024, 1024, 1024)), 512, 1 << 27)


@dataclass(frozen=True)
class Rates:
    """Measured rates: matmuls in FLOP/s by shape, attention in FLOP/s by head size, copies in bytes per second."""

    half_products: dict[tuple[int, int, int], float]
    single_products: dict[tuple[int, int, int], float]
    attention_forward: dict[int, float]
    attention_backward: dict[int, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float


def measure_rates(device: Device, sizes: Sizes) -> Rates:
    """Measure the rates of a device, which takes seconds on a GPU and less than a minute on two CPU cores."""
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
    return 2.0 * rows * inner * columns / time_work(partial(torch.matmul, left, right), device, repeats=_RATE_REPEATS)


def _attention(device: Device, length: int, head_size: int) -> tuple[float, float]:
    """Measure the FLOP/s of causal attention, forward and backward."""
    shape = 1, _HEADS, length, head_size
    query, key, value = (
        torch.randn(shape, device=device.torch_device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    attend: Callable[[], torch.Tensor] = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
    forward = time_work(attend, device, repeats=_RATE_REPEATS)
    gradient = torch.randn(shape, device=device.torch_device, dtype=torch.bfloat16)
    both = time_work(
        lambda: torch.autograd.grad(attend(), (query, key, value), gradient), device, repeats=_RATE_REPEATS
    )
    flops = 2.0 * _HEADS * length**2 * head_size
    return flops / forward, _ATTENTION_BACKWARD * flops / max(both - forward, forward / 100)


def _memory(device: Device, num_bytes: int) -> float:
    """Measure the bytes per second that an elementwise kernel reads and writes."""
    source = torch.zeros(num_bytes // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / time_work(partial(torch.add, source, 1.0, out=target), device, repeats=_RATE_REPEATS)
