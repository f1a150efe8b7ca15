"""Part 1: what the roofline rests on: costs of launches, rates of copies, and the matmul rate over seconds."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron.cli.doctor.benchmarks import measure_host_copies
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.triton_support import triton_works
from tests.gpu.window.clock import KernelClock, host_microseconds
from tests.gpu.window.parts.environment import gpu_settings
from tests.gpu.window.window import Unsupported, Window

_PER_BATCH = 20


def run(window: Window) -> None:
    """Write the constants."""
    count = 20 if window.small else 2000
    x = torch.zeros(1, 2, device=window.place)
    with window.attempt("host time of an operator's launch"):
        window.value("host time of an operator's launch", host_microseconds(lambda: x.add_(1.0), count), "us")
    with window.attempt("time of the shortest kernel"):
        clock = KernelClock(window.place, small=window.small)
        window.value("time of the shortest kernel", clock.milliseconds(lambda: x.add_(1.0)) * 1e3, "us", key="kernel")
    with window.attempt("host time of a Triton launch"):
        if not triton_works():
            raise Unsupported("Triton is absent here, or does not work")
        with torch.no_grad():
            launch = host_microseconds(lambda: gated_activation(x, "swiglu"), count)
        window.value("host time of a Triton launch", launch, "us")
    with window.attempt("host time of an autograd function, forward and backward"):
        leaf = torch.zeros(1, device=window.place, requires_grad=True)

        def both_passes() -> None:
            _Identity.apply(leaf).backward()  # type: ignore[no-untyped-call]

        microseconds = host_microseconds(both_passes, count // 4)
        window.value("host time of an autograd function, forward and backward", microseconds, "us")
    _copies(window)
    _sustained(window)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _copies(window: Window) -> None:
    num_bytes = 2**16 if window.small else 2**30
    with window.attempt("copy on the device, read and written"):
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=window.place)
        target = torch.empty_like(source)
        clock = KernelClock(window.place, small=window.small)
        seconds = clock.milliseconds(lambda: target.copy_(source)) / 1e3
        rate = 2 * num_bytes / max(seconds, 1e-12) / 1e9
        window.value("copy on the device, read and written", rate, "GB/s", key="copy")
    with window.attempt("copies between pinned host memory and the device"):
        for name, found in measure_host_copies(window.device, num_bytes // 4).items():
            window.value(f"copy, {name}", found.bus_bytes_per_s / 1e9, "GB/s", key="host copy")


def _sustained(window: Window) -> None:
    """Multiply 8192 × 8192 matrices for some seconds: a GPU that grows hot lowers its clock."""
    size, seconds = (64, 0.2) if window.small else (8192, min(8.0, 0.4 * max(window.time_left(), 0.0) + 2.0))
    name = f"bf16 matmul of {size}³"
    with window.attempt(name):
        left, right = (torch.randn(size, size, device=window.place).bfloat16() for _ in range(2))
        result = left @ right
        rates = []
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(_PER_BATCH):
                torch.mm(left, right, out=result)
            end.record()
            end.synchronize()
            rates.append(_PER_BATCH * 2.0 * size**3 / max(float(start.elapsed_time(end)), 1e-6) / 1e9)
        settings = gpu_settings()
        part = max(1, len(rates) // 8)
        first, last = (sum(some) / len(some) for some in (rates[:part], rates[-part:]))
        window.value(f"{name}, first eighth of {seconds:.0f} s", first, "TFLOP/s", key="large matmul")
        window.value(f"{name}, last eighth of {seconds:.0f} s", last, "TFLOP/s", key="large matmul", **settings)
