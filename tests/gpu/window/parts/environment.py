"""Part 0: versions, clocks and power; which of the paths that the project prefers are there."""

from __future__ import annotations

import shutil
import subprocess
import time

import torch
import torch.nn.functional as F

from megatron.core.ops.fp8_tensor import (
    E4M3,
    ROWS,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    device_product,
    quantize,
)
from megatron.core.ops.gemm import why_no_wide_products
from megatron.core.ops.triton_support import casts_to_float8, triton_works
from tests.gpu.window import findings
from tests.gpu.window.window import Unsupported, Window

_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,driver_version"
PROBES: tuple[tuple[str, Blocks, Blocks], ...] = (
    ("delayed and tensorwise", WHOLE, WHOLE),
    ("rowwise", ROWS, ROWS),
    ("blockwise, by weights", SEGMENTS_OF_128, SQUARES_OF_128),
    ("blockwise, weight gradients", SEGMENTS_OF_128, SEGMENTS_OF_128),
    ("mxfp8", SEGMENTS_OF_32, SEGMENTS_OF_32),
)
_FIRST_WITH_FLOAT8, _FIRST_WITH_MX, _HOPPER = (8, 9), (10, 0), (9, 0)
_TOLERANCE = 1e-2
"""bfloat16 rounds a result by 2⁻⁹ of it; the norm of the differences of many is below this."""


def run(window: Window) -> None:
    """Write what is there."""
    _versions(window)
    if settings := gpu_settings():
        window.add("clocks and power before the window", findings.RECORDED, **settings)
    else:
        window.add("clocks and power before the window", findings.UNSUPPORTED, reason="nvidia-smi was not found")
    _triton(window)
    with window.attempt("fp32 accumulation in bf16 matmuls (addmm.dtype_out)"):
        reason = why_no_wide_products(torch.bfloat16, window.place)
        window.add(
            "fp32 accumulation in bf16 matmuls (addmm.dtype_out)",
            findings.PASSED if reason is None else findings.FAILED,
            **({} if reason is None else {"reason": reason}),
        )
    for name, left, right in PROBES:
        name = f"FP8 matmul, {name}"
        with window.attempt(name):
            check_scaled_product(window, name, left, right)
    _attention_kernels(window)


def gpu_settings() -> dict[str, str]:
    """Return clocks, power and temperature by nvidia-smi; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)[:200]}
    values = done.stdout.strip().split(", ")
    names = _QUERY.split(",")
    return dict(zip(names, values)) if len(values) == len(names) else {"nvidia-smi": (done.stdout + done.stderr)[:200]}


def _versions(window: Window) -> None:
    properties = torch.cuda.get_device_properties(0)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "absent"
    window.add(
        "versions",
        findings.RECORDED,
        gpu=window.gpu_name,
        capability=f"{window.capability[0]}.{window.capability[1]}",
        memory_gib=round(properties.total_memory / 2**30, 1),
        multiprocessors=properties.multi_processor_count,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        cudnn=str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        triton=triton_version,
        predictions=window.gpu or "none, because no published figures of this GPU are known here",
    )
    try:
        from megatron.core.datasets import _helpers  # noqa: F401

        is_compiled = True
    except ImportError:
        is_compiled = False
    fallback = "the NumPy fallback is used" + (
        "" if is_compiled else ": the extension is not compiled, which costs time when data sets are indexed only"
    )
    window.add("compiled data index", findings.RECORDED, note="in use" if is_compiled else fallback)


def _triton(window: Window) -> None:
    with window.attempt("Triton works"):
        begun = time.perf_counter()
        works = triton_works()
        seconds = time.perf_counter() - begun
        if not works:
            raise RuntimeError("a first program could not be compiled and run; torch's own operators are used")
        note = "interpreted" if window.is_emulated else "compiled and run"
        window.add("Triton works", findings.PASSED, note=f"first program {note} in {seconds:.1f} s")
    with window.attempt("Triton casts to FP8"):
        if (reason := why_no_float8(window.capability, WHOLE)) is not None:
            raise Unsupported(reason)
        works = casts_to_float8("cuda")
        window.add("Triton casts to FP8", findings.PASSED if works else findings.FAILED)


def why_no_float8(capability: tuple[int, int], blocks: Blocks) -> str | None:
    """Return why this GPU type has no FP8 matmuls with scales of such blocks, None if it should have them."""
    gpu = f"compute capability {capability[0]}.{capability[1]}"
    if capability < _FIRST_WITH_FLOAT8:
        return f"{gpu} has no FP8 tensor cores; they exist from 8.9 on"
    if blocks == SEGMENTS_OF_32 and capability < _FIRST_WITH_MX:
        return f"{gpu} has no MXFP8 tensor cores; they exist from 10.0 (Blackwell) on"
    if blocks == SEGMENTS_OF_128 and capability[0] != _HOPPER[0]:
        return f"cuBLAS has matmuls with scales per 128 values on compute capability 9.0 only, and this is {gpu}"
    if blocks == ROWS and capability < _HOPPER:
        return f"torch has matmuls with a scale per row from compute capability 9.0 on, and this is {gpu}"
    return None


def check_scaled_product(window: Window, name: str, left: Blocks, right: Blocks, size: int = 256) -> None:
    """Compare an FP8 matmul of the device with the float32 matmul of the same quantized operands on the CPU."""
    if (reason := why_no_float8(window.capability, left)) is not None:
        raise Unsupported(reason)
    generator = torch.Generator().manual_seed(3)
    operands = [torch.randn(size, size, generator=generator) for _ in range(2)]
    on_host = [quantize(x, E4M3, blocks) for x, blocks in zip(operands, (left, right))]
    expected = on_host[0].values() @ on_host[1].values().t()
    on_device = [quantize(x.to(window.place), E4M3, blocks) for x, blocks in zip(operands, (left, right))]
    actual = device_product(on_device[0], on_device[1], torch.bfloat16).float().cpu()
    difference = ((actual - expected).norm() / expected.norm()).item()
    window.close_to(name, difference, _TOLERANCE, "the same FP8 operands multiplied in float32 on the CPU")


def _attention_kernels(window: Window) -> None:
    """Write which kernels torch's attention takes, by the names that the profiler sees."""
    if window.is_emulated:
        reason = "the emulator has no kernels whose names could be read"
        window.add("attention kernels by name", findings.UNSUPPORTED, reason=reason)
        return
    for width in (64, 128, 192):
        for kind in ("plain", "grouped", "dropout 0.1"):
            name = f"attention kernels, d {width}, {kind}"
            with window.attempt(name):
                groups = _HEADS // 4 if kind == "grouped" else _HEADS
                query = torch.randn(2, _HEADS, _LENGTH, width, dtype=torch.bfloat16, device=window.place)
                key = torch.randn(2, groups, _LENGTH, width, dtype=torch.bfloat16, device=window.place)
                query.requires_grad_()
                dropout = 0.1 if kind == "dropout 0.1" else 0.0

                def attend(query: torch.Tensor = query, key: torch.Tensor = key, dropout: float = dropout) -> None:
                    output = F.scaled_dot_product_attention(
                        query, key, key, dropout_p=dropout, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
                    )
                    torch.autograd.backward(output.sum())

                window.add(name, findings.RECORDED, kernels=_kernels_of(attend))


def _kernels_of(work: object) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    assert callable(work)
    work()
    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        work()
        torch.cuda.synchronize()
    found = {event.key for event in recorder.key_averages() if any(word in event.key.lower() for word in _ATTENTION)}
    return sorted(name[:120] for name in found)


_HEADS, _LENGTH = 8, 1024
_ATTENTION = ("flash", "fmha", "cudnn", "attention", "sdpa")
