"""Ranks that work in folders of their own, as machines without a shared file system do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.save import prepare_save_directory
from megatron.config.run_config import CheckpointConfig
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.device import Device
from megatron.core.errors import CheckpointError, DataError
from megatron.core.model_parallel_config import ONE_RANK
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.batch_source import build_datasets
from megatron.training.checkpointing import open_saver
from megatron.training.data_plan import SampleTargets
from megatron.training.initialize import Runtime
from tests.harness.distributed import run_distributed

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
            assert lines[0].startswith("--save checkpoints is a folder of its own for each of 2 machines: ")


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
    assert refused[0].startswith(
        "--ckpt-format torch needs a folder that all machines share, and --save checkpoints is"
    )
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
