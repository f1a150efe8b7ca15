"""Part 3: kernels and Triton programs against torch's operators, and inputs that kernels often get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.ops.fp8_tensor import E4M3, E5M2, quantize_whole
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.gemm import grouped_gradient, grouped_product
from megatron.core.ops.triton_support import runs_on_triton
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.cross_entropy import vocab_sharded_cross_entropy
from tests.gpu.kernels import ALLOWED, KernelSizes, compare_all, kernel_pairs
from tests.gpu.window import findings
from tests.gpu.window.window import Unsupported, Window

_TWIN = "the same computation in single torch operators"
_CPU = "the same on the CPU"


def run(window: Window) -> None:
    """Compare everything."""
    _strided(window)
    _experts(window)
    _casts(window)
    sizes = KernelSizes(16, 1, 4, 2, 16) if window.small else KernelSizes()
    formats = (torch.bfloat16,) if window.small else (torch.bfloat16, torch.float32, torch.float16)
    for dtype in formats:
        name = f"kernels in {dtype}"
        if window.is_time_for(name):
            with window.attempt(name):
                pairs = kernel_pairs(window.device, dtype, sizes)
                compare_all(pairs, window.device, dtype, _adding(window), is_timed=not window.is_emulated)
    _large(window)


def _adding(window: Window) -> Callable[[str, dict[str, Any]], None]:
    def add(section: str, row: dict[str, Any]) -> None:
        if section == "errors":
            window.add(row["name"], findings.FAILED, reason=row["reason"])
            return
        times = {name: row[name] for name in ("kernel_ms", "twin_ms") if row[name] is not None}
        difference = max(row["difference"], row["gradient_difference"])
        window.close_to(row["name"], difference, row["allowed"], _TWIN, **times)

    return add


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference by the norm of what is expected; both on the CPU in float64."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float(((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item())


def _strided(window: Window) -> None:
    """Give kernels tensors whose elements do not lie together."""
    rows, width = (6, 16) if window.small else (514, 1024)
    wide = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1))
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.t().contiguous().t(),
        "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
        "columns of a wider tensor": lambda x: F.pad(x, (0, 8))[:, :-8],
        "misaligned start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
    }
    for name, cut in cases.items():
        name = f"SwiGLU of a strided input: {name}"
        with window.attempt(name):
            x = wide.bfloat16()
            leaf = cut(x.to(window.place)).detach().requires_grad_()
            result = gated_activation(leaf, "swiglu")
            torch.autograd.backward(result.float().square().sum())
            expected_leaf = x.float().requires_grad_()
            first, second = expected_leaf.chunk(2, dim=-1)
            expected = F.silu(first) * second
            torch.autograd.backward(expected.square().sum())
            assert leaf.grad is not None
            assert expected_leaf.grad is not None
            difference = max(relative(result, expected), relative(leaf.grad, expected_leaf.grad))
            window.close_to(name, difference, ALLOWED[torch.bfloat16], "float32 on the CPU")


def _experts(window: Window) -> None:
    """Multiply groups of which some are empty, in memory that was full of NaN before."""
    inner, outer = (16, 32) if window.small else (512, 1024)
    each = 8 if window.small else 256
    cases = {"none empty": (1, 2, 1, 1), "first and last empty": (0, 3, 2, 0), "all but one empty": (0, 0, 5, 0)}
    for kind, multiples in cases.items():
        counts = [count * each for count in multiples]
        rows = sum(counts)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(rows, inner, generator=generator).bfloat16()
        weight = torch.randn(len(counts), outer, inner, generator=generator).bfloat16()
        grad = torch.randn(rows, outer, generator=generator).bfloat16()
        parts = list(zip(x.float().split_with_sizes(counts), grad.float().split_with_sizes(counts), weight.float()))
        name = f"grouped matmul, {kind}"
        with window.attempt(name):
            _leave_nan(window, rows * outer)
            actual = grouped_product(x.to(window.place), weight.to(window.place), counts)
            expected = torch.cat([of_x @ of_weight.t() for of_x, _, of_weight in parts])
            window.close_to(name, relative(actual, expected), 1e-2, f"{_CPU} in float32")
        name = f"grouped weight gradient, {kind}"
        with window.attempt(name):
            _leave_nan(window, weight.numel())
            actual = grouped_gradient(grad.to(window.place), x.to(window.place), counts)
            expected = torch.stack([of_grad.t() @ of_x for of_x, of_grad, _ in parts])
            window.close_to(name, relative(actual, expected), 1e-2, f"{_CPU} in float32")


def _leave_nan(window: Window, count: int) -> None:
    """Fill memory with NaN and free it, so that the next tensor of the size has it."""
    torch.full((count,), torch.nan, dtype=torch.bfloat16, device=window.place)


def _casts(window: Window) -> None:
    """Compare the casts to FP8 byte by byte, of values that are out of range or not finite too."""
    for dtype in (E4M3, E5M2):
        name = f"cast to {str(dtype).removeprefix('torch.')} with transpose"
        with window.attempt(name):
            rows, width = (70, 45) if window.small else (1030, 2051)
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(5)) * torch.logspace(-6, 3, width)
            x[0, :3] = torch.tensor([torch.inf, -1e30, torch.nan])
            x = x.bfloat16()
            on_device = x.to(window.place)
            if not runs_on_triton(on_device):
                raise Unsupported("Triton is absent here, or does not work")
            scale = torch.full((1, 1), 0.5)
            expected = quantize_whole(x, dtype, scale, None, transpose=True)
            actual = quantize_whole(on_device, dtype, scale.to(window.place), None, transpose=True)
            wrong = 0
            for ours, theirs in zip(actual, expected):
                assert ours is not None
                assert theirs is not None
                both = ours.data.cpu().view(torch.uint8), theirs.data.contiguous().view(torch.uint8)
                # NaN has several bit patterns, of which any will do.
                is_nan = ours.values().cpu().isnan() & theirs.values().isnan()
                wrong += int(((both[0] != both[1]) & ~is_nan).sum())
            window.close_to(name, float(wrong), 0.0, f"{_CPU}, bytes that differ")


def _large(window: Window) -> None:
    """Run kernels on more than 2³¹ elements, and compare the last rows."""
    width = 8192
    rows = 2**31 // width + 1024
    for name, work in (("SwiGLU", _large_gate), ("cross-entropy", _large_loss)):
        name = f"{name} of more than 2³¹ elements"
        if not window.is_time_for(name):
            continue
        with window.attempt(name):
            if window.small:
                raise Unsupported("small sizes were asked for")
            if window.memory_bytes < 70 * 2**30:
                raise Unsupported(f"it needs 40 GiB, and the GPU has {window.memory_bytes / 2**30:.0f} GiB")
            difference = work(window, rows, width)
            window.close_to(name, difference, ALLOWED[torch.bfloat16], "the last rows alone")


def _large_gate(window: Window, rows: int, width: int) -> float:
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=window.place).normal_().requires_grad_()
    result = gated_activation(x, "swiglu")
    torch.autograd.backward(result, torch.ones_like(result))
    assert x.grad is not None
    last = x.detach()[-64:].float().requires_grad_()
    first, second = last.chunk(2, dim=-1)
    expected = F.silu(first) * second
    torch.autograd.backward(expected, torch.ones_like(expected))
    assert last.grad is not None
    return max(relative(result[-64:], expected), relative(x.grad[-64:], last.grad))


def _large_loss(window: Window, rows: int, width: int) -> float:
    x = torch.empty(rows, 1, width, dtype=torch.bfloat16, device=window.place).normal_()
    last = x[-64:, 0].float().cpu()
    labels = torch.arange(rows, device=window.place).view(rows, 1) % width
    with torch.no_grad():
        actual = vocab_sharded_cross_entropy(x, labels, width, single_rank_group())
    expected = F.cross_entropy(last, labels[-64:, 0].cpu(), reduction="none")
    return relative(actual[-64:, 0], expected)
