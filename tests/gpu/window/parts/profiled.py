"""Part 8: one profiled step of GPT-2 345M and of the 8B shape: time by kernel name, and how long the GPU is idle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tests.gpu.window import findings
from tests.gpu.window.shapes import gpt2_runs, headline_runs, shapes_of
from tests.gpu.window.train import training
from tests.gpu.window.window import Unsupported, Window

_NUM_STEPS = 2
_NUM_WARMUP = 3
_NUM_NAMES = 20
_NAME_CHARACTERS = 90
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|_mm_|wgmma", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|flex", re.IGNORECASE)


def run(window: Window) -> None:
    """Profile the first run of part 5 and the first of part 7."""
    shapes = shapes_of(small=window.small)
    small_model = gpt2_runs(shapes, small=window.small)[0]
    large = headline_runs(shapes, window.memory_bytes, small=window.small)[0]
    for name, timed in ((f"GPT-2 345M, {small_model.name}", small_model), (large.name, large)):
        if not window.is_time_for(f"profile of {name}", 1.0):
            continue
        with window.attempt(f"profile of {name}"):
            with training(timed.flags, window.device, draws_on_device=not window.small) as trained:
                trained.run(_NUM_WARMUP)
                activity = ProfilerActivity.CPU if window.is_emulated else ProfilerActivity.CUDA
                with profile(activities=[activity]) as recorder:
                    trained.run(_NUM_STEPS)
            if window.is_emulated:
                raise Unsupported("the emulator has no kernels to profile; the steps themselves ran")
            _write(window, name, timed.key, recorder.events() or [])


def _write(window: Window, name: str, key: str, events: Iterable[Any]) -> None:
    spans, by_name, by_kind = [], defaultdict[str, float](float), defaultdict[str, float](float)
    for event in events:
        if event.device_type != DeviceType.CUDA:
            continue
        milliseconds = event.time_range.elapsed_us() / 1e3
        spans.append((event.time_range.start, event.time_range.end))
        by_name[event.name[:_NAME_CHARACTERS]] += milliseconds / _NUM_STEPS
        by_kind[kind_of_kernel(event.name)] += milliseconds / _NUM_STEPS
    if not spans:
        raise RuntimeError("the profiler saw no kernel: CUPTI may be missing, or be used by another process")
    busy, whole = busy_time(spans)
    window.value(f"{name}: share of the time in which the GPU is busy", 100 * busy / whole, "%", key=f"{key}/busy")
    for kind in ("GEMMs", "attention", "other kernels"):
        window.value(f"{name}: {kind}", by_kind[kind], "ms per step", key=f"{key}/{kind}")
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:_NUM_NAMES]
    window.add(
        f"{name}: longest kernels, ms per step",
        findings.RECORDED,
        longest={kernel: round(milliseconds, 3) for kernel, milliseconds in longest},
    )


def kind_of_kernel(name: str) -> str:
    """Return what a kernel computes, by its name."""
    if _ATTENTION.search(name):
        return "attention"
    return "GEMMs" if _GEMM.search(name) else "other kernels"


def busy_time(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the time in which any of some spans runs, and the time from the first to the last."""
    busy, end = 0.0, float("-inf")
    ordered = sorted(spans)
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, max(end - ordered[0][0], 1e-9)
