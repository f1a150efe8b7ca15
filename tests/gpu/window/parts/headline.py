"""Part 7: time per step of an 8B shape in bf16 and FP8, and of a Qwen3 shape with experts."""

from __future__ import annotations

from megatron.core.ops.fp8_tensor import WHOLE
from tests.gpu.window.parts.environment import why_no_float8
from tests.gpu.window.parts.small_model import time_run
from tests.gpu.window.shapes import headline_runs, shapes_of
from tests.gpu.window.window import Unsupported, Window


def run(window: Window) -> None:
    """Train each shape for some steps."""
    for timed in headline_runs(shapes_of(small=window.small), window.memory_bytes, small=window.small):
        if not window.is_time_for(timed.name, 2.0):
            continue
        with window.attempt(timed.name):
            if timed.needs_float8 and (reason := why_no_float8(window.capability, WHOLE)) is not None:
                raise Unsupported(reason)
            time_run(window, timed.name, timed)
