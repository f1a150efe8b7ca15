"""A rank of a world of 16,384 makes few groups; the others exist on paper only."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from tests.harness.distributed import run_distributed

TP, PP, DP = 8, 16, 128
RANKS = (0, TP * DP * 7 + 13, TP * PP * DP - 1)
MOST_GROUPS = 12


def create_everything(folder: str) -> tuple[int, int, int]:
    """Become a rank of the large world; return its stage, the groups it made and the ranks of its data parallelism."""
    own = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS[own], world_size=TP * PP * DP)
    made: list[int] = []
    new_group = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return new_group(*args, **kwargs)

    dist.new_group = counting
    try:
        state = create_parallel_state(ParallelSizes(tp=TP, pp=PP))
        create_pipeline_links(state.pp, wraps_around=True)
    finally:
        dist.new_group = new_group
        dist.destroy_process_group()
        # The harness expects the group that it made.
        dist.init_process_group("gloo", init_method=f"file://{folder}/after", rank=own, world_size=len(RANKS))
    return state.pp.rank, len(made), state.dp.size


def test_every_rank_makes_at_most_twelve_groups(tmp_path: Any) -> None:
    results = run_distributed(len(RANKS), create_everything, str(tmp_path))
    assert [(stage, dp) for stage, _, dp in results] == [(0, DP), (7, DP), (PP - 1, DP)]
    assert all(0 < made <= MOST_GROUPS for _, made, _ in results), results
