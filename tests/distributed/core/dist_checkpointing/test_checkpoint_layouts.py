"""Several ranks plan a save among replicas, save into one folder, and load at the same layout and at others."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.load import load_checkpoint, load_model_weights, read_common
from megatron.checkpoint.save import CommonState, prepare_save_directory
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing import disk, shard_file
from megatron.core.dist_checkpointing import planner as planner_module
from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import SavePlanner, whole_tensor
from megatron.core.dist_checkpointing.shard_file import shard_name
from megatron.core.errors import CheckpointError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import (
    ParallelState,
    create_parallel_state,
    describe_parallel_state,
    gather_from_world,
)
from tests.harness.distributed import RankFailure, run_distributed
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.core.dist_checkpointing.toy import (
    ToyModel,
    assert_equal_runs,
    assert_equal_tensors,
    empty_run,
    filled_run,
    save_tensors,
    toy_tensors,
)

CONFIG = {"model": {"num_layers": 4}}


def logger(state: ParallelState, lines: list[str]):
    return lines.append if state.rank == 0 else lambda line: None


def save(directory: str, iteration: int, state: ParallelState) -> None:
    common = CommonState(progress=TrainProgress(iteration=iteration), config=CONFIG)
    save_checkpoint(directory, filled_run(state), common, state, CheckpointConfig(), logger(state, []))


def save_at(directory: str, tp: int, iterations: tuple[int, ...] = (10,)) -> None:
    state = create_parallel_state(ParallelSizes(tp=tp))
    for iteration in iterations:
        save(directory, iteration, state)


def load_at(directory: str, tp: int, same_layout: bool, iteration: int = 10) -> list[str]:
    state = create_parallel_state(ParallelSizes(tp=tp))
    lines: list[str] = []
    prepare_save_directory(directory, state, logger(state, lines))
    run, expected = empty_run(state), filled_run(state)
    loaded = load_checkpoint(directory, run, state, CheckpointConfig(), CONFIG, logger(state, lines))
    assert loaded is not None
    assert loaded.progress.iteration == iteration
    assert_equal_runs(run, expected)
    if same_layout:
        assert loaded.rng is not None
        for name, tensor in expected.rng.items():
            assert torch.equal(loaded.rng[name], tensor)
    else:
        assert loaded.rng is not None
        assert list(loaded.rng) == ["default"]
    return lines


def fail_on_rank_1(directory: str, tp: int) -> str:
    """Save once, then again with no room for the file of rank 1; return what this rank is told."""
    state = create_parallel_state(ParallelSizes(tp=tp))
    save(directory, 10, state)
    if state.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        save(directory, 20, state)
    except CheckpointError as error:
        return str(error)
    return "saved"


def die_while_writing(directory: str, tp: int) -> None:
    """Save once; in the second save rank 1 is killed when its file is on disk and not yet published."""
    state = create_parallel_state(ParallelSizes(tp=tp))
    save(directory, 10, state)
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        if state.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    disk.os.fsync = fsync
    save(directory, 20, state)


def load_damaged(directory: str, tp: int) -> str:
    state = create_parallel_state(ParallelSizes(tp=tp))
    try:
        load_checkpoint(directory, empty_run(state), state, CheckpointConfig(), CONFIG, lambda line: None)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def load_weights(directory: str, tp: int) -> bool:
    state = create_parallel_state(ParallelSizes(tp=tp))
    assert read_common(directory)["config"] == CONFIG
    model, expected = ToyModel(state), filled_run(state).models[0]
    load_model_weights(directory, [model], state, lambda line: None)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "source",
    [*LAYOUTS[:1], *(pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS[1:3]), *LAYOUTS[3:]],
    ids=str,
)
def test_saved_at_one_layout_and_loaded_at_all(tmp_path: Path, source: tuple[int, int]) -> None:
    run_distributed(source[0], save_at, str(tmp_path), source[1])
    for target in LAYOUTS:
        same = source == target
        lines, *others = run_distributed(target[0], load_at, str(tmp_path), target[1], same)
        assert all(not other for other in others)
        reseeded = [line for line in lines if line.startswith("random number streams: tensor-parallel restart from")]
        assert len(reseeded) == (0 if same else 1)


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    run_distributed(4, save_at, str(tmp_path), 1)
    files = sorted((tmp_path / "iter_0000010").glob("shard_*.safetensors"))
    assert [path.name for path in files] == [f"shard_{rank:05d}.safetensors" for rank in range(4)]


def test_a_rank_that_cannot_write_is_everyones_error_and_nothing_is_left(tmp_path: Path) -> None:
    first, second = run_distributed(2, fail_on_rank_1, str(tmp_path), 2)
    assert first == second
    assert first.startswith(f"cannot write {tmp_path / '.iter_0000020.saving' / 'shard_00001.safetensors'}")
    assert os.strerror(errno.EFBIG) in first
    assert "it needs " in first
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000010",
        "latest_checkpointed_iteration.txt",
    ]
    run_distributed(2, load_at, str(tmp_path), 2, True)


def test_killed_while_saving_the_previous_checkpoint_loads(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died with exit code -9"):
        run_distributed(2, die_while_writing, str(tmp_path), 2)
    leftover = tmp_path / ".iter_0000020.saving"
    assert leftover.is_dir()
    lines, _ = run_distributed(2, load_at, str(tmp_path), 2, True)
    assert lines[0] == f"removed {leftover}, left by an interrupted save"
    assert not leftover.exists()


def test_damage_that_one_rank_sees_makes_all_fall_back_or_fail(tmp_path: Path) -> None:
    run_distributed(2, save_at, str(tmp_path), 2, (10, 20))
    # The last entry of this file is a random number stream of rank 1: no other rank reads it.
    flip_byte(tmp_path / "iter_0000020" / "shard_00001.safetensors", -1)
    lines, _ = run_distributed(2, load_at, str(tmp_path), 2, True)
    assert any("is damaged" in line for line in lines)
    assert any(line.endswith(f"falling back to {tmp_path / 'iter_0000010'}") for line in lines)
    flip_byte(tmp_path / "iter_0000010" / "shard_00001.safetensors", -1)
    first, second = run_distributed(2, load_damaged, str(tmp_path), 2)
    assert first == second
    assert first.startswith("all 2 checkpoints are damaged")


def test_weights_load_for_inference_at_other_sizes(tmp_path: Path) -> None:
    run_distributed(4, save_at, str(tmp_path), 2)
    assert run_distributed(2, load_weights, str(tmp_path), 2) == [True, True]
    assert run_distributed(1, load_weights, str(tmp_path), 1) == [True]


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
    real = planner_module.all_gather_objects

    def counting(value: Any, group: Any) -> list[Any]:
        groups.append(group.size)
        return real(value, group)

    planner_module.all_gather_objects = counting  # type: ignore[attr-defined]
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
        "no rank has model.embedding.weight[8:11,0:5]; nothing was saved"
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
