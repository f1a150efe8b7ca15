"""Memory, time and communication of a run before it starts: explanations, layout search, and simulated steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.planner.choice import SEARCHED_FLAGS, Choice, has_flag
    from megatron.planner.evaluation import describe_errors, evaluate, read_runs
    from megatron.planner.explanation import explain, find_changes, with_known_vocabulary
    from megatron.planner.gpu import GPUS, AttentionRate, Gpu, find_gpu, gpu_to_json, read_gpu
    from megatron.planner.implementations import IMPLEMENTATIONS, NATIVE, Implementation, find_implementation
    from megatron.planner.pipeline_chart import HUES, LETTERS, draw_svg, label, rows_of, summary, title
    from megatron.planner.plan import DEEPEP_AS_ALLTOALL, ExpertLayer
    from megatron.planner.prediction import HOPPER_MACHINES, lacks_format, usable_bytes
    from megatron.planner.recommendation import Recommendation, recommend
    from megatron.planner.report import (
        Variation,
        describe_changes,
        describe_comparison,
        describe_experts,
        describe_ranking,
        describe_sensitivities,
        find_sensitivity,
        launch_command,
        ranking_json,
        to_page,
        to_text,
        variations,
    )
    from megatron.planner.search import Candidate, Search
    from megatron.planner.step_time import MEMORY_SHARE
    from megatron.planner.trace_store import trace_in_this_process
    from megatron.planner.traces import ATTENTION, GEMM, MEMORY, PHASES, TraceRequest
    from megatron.planner.verified_stage import VerifiedStage, stages_to_verify, verify_stage

__getattr__ = lazy_exports(
    __name__,
    {
        "choice": "Choice SEARCHED_FLAGS has_flag",
        "evaluation": "describe_errors evaluate read_runs",
        "explanation": "explain find_changes with_known_vocabulary",
        "gpu": "AttentionRate GPUS Gpu find_gpu gpu_to_json read_gpu",
        "implementations": "IMPLEMENTATIONS Implementation NATIVE find_implementation",
        "pipeline_chart": "HUES LETTERS draw_svg label rows_of summary title",
        "plan": "DEEPEP_AS_ALLTOALL ExpertLayer",
        "prediction": "HOPPER_MACHINES lacks_format usable_bytes",
        "recommendation": "Recommendation recommend",
        "report": (
            "Variation describe_changes describe_comparison describe_experts describe_ranking "
            "describe_sensitivities find_sensitivity launch_command ranking_json to_page to_text variations"
        ),
        "search": "Candidate Search",
        "step_time": "MEMORY_SHARE",
        "trace_store": "trace_in_this_process",
        "traces": "ATTENTION GEMM MEMORY PHASES TraceRequest",
        "verified_stage": "VerifiedStage stages_to_verify verify_stage",
    },
)
