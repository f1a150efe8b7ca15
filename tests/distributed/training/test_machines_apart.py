"""Ranks that work in folders of their own, as machines without a shared file system do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.datasets.blended_dataset_builder import DatasetSplits
from megatron.core.device import Device
from megatron.core.errors import CheckpointError, DataError
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.data_plan import SampleTargets
from megatron.training.data_setup import build_datasets
from megatron.training.initialize import Runtime
from megatron.training.save_directory import prepare_save_directory
from tests.harness.distributed import run_distributed

NOTHING = DatasetSplits(None, None, None)


def prepare(folders: list[str]) -> str:
    """Prepare ``checkpoints`` below this rank's folder; return what is wrong with it, or what it holds."""
    os.chdir(folders[dist.get_rank()])
    try:
        prepare_save_directory("checkpoints", create_parallel_state(), lambda line: None)
    except CheckpointError as error:
        return str(error)
    dist.barrier()
    return str(sorted(os.listdir("checkpoints")))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_save_folder_on_each_machine_is_refused_at_once(is_there: bool, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        if is_there:
            (folder / "checkpoints").mkdir()
    messages = run_distributed(2, prepare, [str(folder) for folder in folders])
    assert messages[0] == messages[1]
    assert messages[0].startswith("--save checkpoints of rank 1 is not the folder of rank 0; give --save a folder on")
    assert list((folders[0] / "checkpoints").iterdir()) == []


def test_a_shared_save_folder_is_left_clean(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".0123.shared").touch()
    assert run_distributed(2, prepare, [str(tmp_path)] * 2) == ["[]", "[]"]


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
    rng = RngStreams(Device("cpu"), 1, tp_rank=0, dp_rank=0, cp_rank=0, pp_rank=0)
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
