"""A training step on a simulated GPU: kernels, memory, waits, communication, and an estimate of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.planner.simulation.estimate import EstimatedRun, estimate_step, slowest_of
    from megatron.planner.simulation.fake_cuda import load_fake_cuda
    from megatron.planner.simulation.fake_triton import has_triton_package
    from megatron.planner.simulation.piece_tracer import take_traces
    from megatron.planner.simulation.recorder import StepRecord
    from megatron.planner.simulation.report import draw_memory, to_json, to_text

__getattr__ = lazy_exports(
    __name__,
    {
        "estimate": "EstimatedRun estimate_step slowest_of",
        "fake_cuda": "load_fake_cuda",
        "fake_triton": "has_triton_package",
        "piece_tracer": "take_traces",
        "recorder": "StepRecord",
        "report": "draw_memory to_json to_text",
    },
)
