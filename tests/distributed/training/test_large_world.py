"""Large worlds and machines apart: few groups, few exchanges of objects, and folders that are not shared."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.checkpoint.save import prepare_save_directory
from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import CheckpointConfig
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.device import Device, select_device
from megatron.core.errors import CheckpointError, DataError
from megatron.core.parallel_config import ONE_RANK, ParallelSizes
from megatron.core.parallel_state import all_gather_from_world, create_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.timers import Timers
from megatron.training.batch_source import build_datasets
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.data_plan import SampleTargets
from megatron.training.initialize import Runtime, make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.pretraining import with_vocabulary
from pretrain_gpt import provide_model
from tests.e2e.toy_run import toy_args
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


def save_and_load(folder: str, flags: str) -> list[tuple[str, int]]:
    """Build a run, save it and load it; return the objects that were gathered: by what, and over how many ranks."""
    from megatron.core.tokenizers.build_tokenizer import build_tokenizer

    gathered: list[tuple[str, int]] = []

    def counting(name: str) -> Any:
        real = getattr(dist, name)

        def gather(*args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
            gathered.append((name, dist.get_world_size(group)))
            real(*args, group=group, **kwargs)

        return gather

    names = ("all_gather_object", "gather_object")
    with patch.multiple(dist, **{name: counting(name) for name in names}):
        config = resolve_arguments(toy_args(Path(folder), flags), dist.get_world_size()).config
        tokenizer = build_tokenizer(
            tokenizer_type=config.tokenizer.tokenizer_type, vocab_size=config.tokenizer.vocab_size
        )
        config = with_vocabulary(config, tokenizer, lambda line: None)
        runtime = make_runtime(config, select_device(0))
        for iteration in (0, 3):
            parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
            saver = open_saver(config.checkpoint, runtime, lambda line: None)
            checkpoints = RunCheckpoints(config, runtime, parts, tokenizer, saver, lambda line: None)
            train_state = checkpoints.resume()
            assert train_state.iteration == iteration
            checkpoints.save(TrainState(iteration=iteration + 3))
            checkpoints.finish()
            checkpoints.close()
            timers = Timers()
            with timers("load-checkpoint"):
                pass
            assert bool(timers.report(runtime.state)) == (runtime.state.rank == 0)
    return gathered


def test_a_start_a_save_and_a_load_gather_no_objects_over_the_world(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    flags += " --param-group-overrides *.bias:lr_mult=0.5"
    for gathered in run_distributed(4, save_and_load, str(tmp_path), flags, timeout_s=60):
        assert gathered
        assert {size for _, size in gathered} == {2}


def items_of_the_world() -> list[list[tuple[int, ...]]]:
    state = create_parallel_state(ParallelSizes(tp=2, pp=2))
    return all_gather_from_world([(state.rank,), (state.tp.rank, 7)], state)


def test_items_come_in_the_order_of_the_ranks() -> None:
    results = run_distributed(8, items_of_the_world)
    assert results == [[[(rank,), (rank % 2, 7)] for rank in range(8)]] * 8


NOTHING = DatasetSplits(None, None, None)


def prepare(folders: list[str]) -> tuple[tuple[int, ...], list[str], list[str]]:
    """Prepare ``checkpoints`` below this rank's folder; return who shares one, what it holds, and the log."""
    os.chdir(folders[dist.get_rank()])
    lines: list[str] = []
    folders = prepare_save_directory("checkpoints", create_parallel_state(), lines.append)
    folders.release()
    dist.barrier()
    return folders.leaders, sorted(os.listdir("checkpoints")), lines


def leave_old_mark(directory: Path) -> None:
    """Leave what a run that was killed an hour ago did."""
    mark = directory / ".0123.000000.shared"
    mark.touch()
    os.utime(mark, (time.time() - 3600.0,) * 2)


@pytest.mark.default(1)
@pytest.mark.parametrize("is_there", [False, True])
def test_ranks_find_out_which_of_them_share_a_folder(is_there: bool, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        if is_there:
            (folder / "checkpoints").mkdir()
            leave_old_mark(folder / "checkpoints")
    for leaders in ((0, 0, 2, 2), (0, 1, 0, 1), (0, 1, 1, 1)):
        found = run_distributed(4, prepare, [str(folders[int(leader > 0)]) for leader in leaders])
        for shares, content, lines in found:
            assert shares == leaders
            assert content == []
            assert lines[0].startswith("--save checkpoints is a separate folder on each of 2 nodes: ")


def test_a_shared_save_folder_is_left_clean(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    leave_old_mark(tmp_path / "checkpoints")
    assert run_distributed(2, prepare, [str(tmp_path)] * 2) == [((0, 0), [], [])] * 2


def test_a_folder_that_one_machine_cannot_make_ends_the_run_everywhere(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "checkpoints").symlink_to("nowhere/at/all")
    expected = "cannot prepare checkpoints on rank 1: File exists; change --save"
    assert run_distributed(2, refuse, [str(folder) for folder in folders]) == [expected] * 2


def refuse(folders: list[str]) -> str:
    os.chdir(folders[dist.get_rank()])
    try:
        prepare_save_directory("checkpoints", create_parallel_state(), lambda line: None)
    except CheckpointError as error:
        return str(error)
    return "prepared"


def open_for_megatrons_files(folders: list[str]) -> str:
    os.chdir(folders[dist.get_rank()])
    state = create_parallel_state()
    rng = RngStreams(Device("cpu"), 1, state.place)
    options = CheckpointConfig(save="checkpoints", ckpt_format="torch")
    try:
        open_saver(options, Runtime(Device("cpu"), state, rng), lambda line: None)
    except CheckpointError as error:
        return str(error)
    return "opened"


def test_megatrons_files_need_one_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    refused = run_distributed(2, open_for_megatrons_files, [str(folder) for folder in folders])
    assert refused[0] == refused[1]
    assert refused[0].startswith("--ckpt-format torch needs a folder that all nodes share, but --save checkpoints is")
    assert run_distributed(2, open_for_megatrons_files, [str(tmp_path)] * 2) == ["opened", "opened"]


class Builder:
    """Note the ranks that built before this one, in a folder of the rank's machine."""

    def __init__(self, cache: Path, broken_rank: int | None) -> None:
        self.cache = cache
        self.broken_rank = broken_rank
        self.found: list[str] = []

    def check(self) -> None:
        """Accept everything."""

    def build(self) -> DatasetSplits:
        """Look into the cache and enter this rank there."""
        rank = dist.get_rank()
        if rank == self.broken_rank:
            raise DataError("its copy of the data is damaged")
        self.found = sorted(os.listdir(self.cache))
        (self.cache / str(rank)).touch()
        return NOTHING


def build_on_two_machines(caches: list[str], broken_rank: int | None) -> list[str] | str:
    """Build with two ranks on each of two machines."""
    machine, local_rank = divmod(dist.get_rank(), 2)
    state = create_parallel_state()
    rng = RngStreams(Device("cpu"), 1, ONE_RANK.place())
    builder = Builder(Path(caches[machine]), broken_rank)
    try:
        build_datasets(builder, SampleTargets(1, 1, 1), Runtime(Device("cpu"), state, rng, local_rank))
    except DataError as error:
        return str(error)
    return builder.found


def test_one_rank_of_each_machine_builds_the_index_cache_for_the_others(tmp_path: Path) -> None:
    caches = [str(tmp_path / name) for name in ("first", "second")]
    for cache in caches:
        os.mkdir(cache)
    found = run_distributed(4, build_on_two_machines, caches, None)
    assert found[0] == []
    assert found[1] == ["0"]
    assert found[2] == []
    assert found[3] == ["2"]


@pytest.mark.parametrize("broken", [0, 2, 3])
def test_data_that_one_machine_lacks_ends_the_run_on_every_rank(broken: int, tmp_path: Path) -> None:
    prefix = "" if broken == 0 else f"rank {broken}: "
    expected = f"{prefix}its copy of the data is damaged"
    assert run_distributed(4, build_on_two_machines, [str(tmp_path)] * 2, broken) == [expected] * 4
