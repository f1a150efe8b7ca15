"""Ranks plan a save among replicas, keep the plan, and send the rest to the first rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import planner as save_plan
from megatron.core.dist_checkpointing import shard_file
from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import SavePlanner, whole_tensor
from megatron.core.dist_checkpointing.shard_file import shard_name
from megatron.core.errors import CheckpointError
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state, gather_from_world
from tests.harness.distributed import run_distributed
from tests.unit.core.dist_checkpointing.toy import assert_equal_tensors, save_tensors, toy_tensors


def gather(sizes: ParallelSizes) -> list[Any]:
    state = create_parallel_state(sizes)
    return gather_from_world(state.rank * 11, state)


@pytest.mark.default(2)
@pytest.mark.parametrize(("tp", "pp", "cp"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (1, 4, 2)])
def test_the_first_rank_gathers_in_the_order_of_the_ranks(tp: int, pp: int, cp: int) -> None:
    first, *others = run_distributed(8, gather, ParallelSizes(tp=tp, pp=pp, cp=cp))
    assert first == [rank * 11 for rank in range(8)]
    assert others == [[]] * 7


def plan_three_times() -> list[tuple[int, list[int], int]]:
    """Plan at TP 2 and DP 2: twice the same, then with one more tensor on the first two ranks."""
    state = create_parallel_state(ParallelSizes(tp=2))
    groups: list[int] = []
    real = save_plan.all_gather_objects

    def counting(value: Any, group: Any) -> list[Any]:
        groups.append(group.size)
        return real(value, group)

    save_plan.all_gather_objects = counting  # type: ignore[attr-defined]
    planner = SavePlanner(state)
    tensors = toy_tensors(state.tp.rank, 2)
    found, plans = [], []
    for more in (0, 0, 1):
        groups.clear()
        if more and state.rank < 2:
            tensors.append(whole_tensor(f"model.more{state.tp.rank}", torch.ones(3)))
        plans.append(planner.plan(tensors))
        own = sum(box.num_elements for tensor in plans[-1].own for box in tensor.boxes)
        found.append((own, list(groups), len(plans[-1].ranks)))
    assert plans[0] is plans[1]
    return found


def test_a_plan_is_made_among_replicas_and_kept_while_nothing_changes() -> None:
    found = run_distributed(4, plan_three_times)
    total = 11 * 5 + 24 * 5 + 5 * 12 + 6 * 5 + 5
    for step, more in enumerate((0, 0, 1)):
        assert sum(rank[step][0] for rank in found) == total + 6 * more
        assert all(rank[step][1] == ([] if step == 1 else [2]) for rank in found)
        assert [rank[step][2] for rank in found] == [4, 0, 0, 0]


def plan_with_a_gap() -> str:
    state = create_parallel_state(ParallelSizes(tp=2))
    tensors = toy_tensors(state.tp.rank, 2)
    with pytest.raises(CheckpointError) as caught:
        SavePlanner(state).plan(tensors if state.tp.is_first else tensors[1:])
    return str(caught.value)


def test_a_gap_is_every_ranks_error() -> None:
    assert set(run_distributed(4, plan_with_a_gap)) == {
        "no rank holds model.embedding.weight[8:11,0:5]; nothing was saved"
    }


def save_in_subfolders(folder: str) -> None:
    """Save with at most two files per folder."""
    shard_file.MAX_FILES_PER_FOLDER = 2
    state = create_parallel_state(ParallelSizes(tp=2))
    save_tensors(Path(folder), toy_tensors(state.tp.rank, 2), {"iteration": 3}, state, 40)


def test_the_files_of_large_worlds_lie_in_subfolders(tmp_path: Path) -> None:
    run_distributed(4, save_in_subfolders, str(tmp_path))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    names = [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert found == [f"shards_0000{folder}/shard_0000{rank}.safetensors" for folder, rank in names]
    state = describe_parallel_state(0, 1)
    for rank in range(2):
        tensors = toy_tensors(rank, 2, filled=False)
        load_tensors(tmp_path, load_index(tmp_path, state.world), tensors, ["model."], state)
        assert_equal_tensors(tensors, toy_tensors(rank, 2))


def test_names_of_shards() -> None:
    assert shard_name(1023, 1024) == "shard_01023.safetensors"
    assert [shard_name(rank, 16_384) for rank in (0, 1024, 16_383)] == [
        "shards_00000/shard_00000.safetensors",
        "shards_00001/shard_01024.safetensors",
        "shards_00015/shard_16383.safetensors",
    ]
    assert shard_name(1024, 16_384, "a1-5") == "shard_01024.a1-5.safetensors"
