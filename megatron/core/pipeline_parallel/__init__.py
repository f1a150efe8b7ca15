"""Pipeline parallelism: the layers of each stage, pipeline schedules, and sends and receives between stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.executor import (
        ChunkForward,
        ChunkResult,
        MicrobatchLoss,
        ModelChunk,
        PipelineConnection,
        ScheduleResult,
        StageInput,
        gather_timeline,
        run_schedule,
    )
    from megatron.core.pipeline_parallel.p2p_communication import (
        MessageOrders,
        PipelineLinks,
        ReceiveQueue,
        SendQueue,
        create_pipeline_links,
    )
    from megatron.core.pipeline_parallel.schedule_actions import (
        SCHEDULES,
        Action,
        Pass,
        StagePlace,
        build_schedule,
        default_schedule,
        first_actions,
        forward_only,
        most_in_flight,
        most_passes_in_flight,
        schedule_problems,
        with_deferred_grads,
    )
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.pipeline_parallel.simulator import Durations, ScheduleError, simulate
    from megatron.core.pipeline_parallel.stage_layout import (
        StageContents,
        StageLayout,
        layout_problems,
        mtp_modules_per_stage,
        plan_stage_layout,
    )
    from megatron.core.pipeline_parallel.timeline import Event, RankTimeline, Timeline, read_timeline, write_timeline

__getattr__ = lazy_exports(
    __name__,
    {
        "executor": (
            "ChunkForward ChunkResult MicrobatchLoss ModelChunk PipelineConnection ScheduleResult StageInput "
            "gather_timeline run_schedule"
        ),
        "p2p_communication": "MessageOrders PipelineLinks ReceiveQueue SendQueue create_pipeline_links",
        "schedule_actions": (
            "Action Pass SCHEDULES StagePlace build_schedule default_schedule first_actions forward_only "
            "most_in_flight most_passes_in_flight schedule_problems with_deferred_grads"
        ),
        "schedules": "get_forward_backward_func",
        "simulator": "Durations ScheduleError simulate",
        "stage_layout": "StageContents StageLayout layout_problems mtp_modules_per_stage plan_stage_layout",
        "timeline": "Event RankTimeline Timeline read_timeline write_timeline",
    },
)
