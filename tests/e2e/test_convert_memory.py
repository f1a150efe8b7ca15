"""A conversion holds one tensor at a time, whatever the size of the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.formats.native import write_native
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.model_parallel_config import ONE_RANK
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, spec_of
from megatron.core.tensor_parallel.random import RngStreams
from tests.harness.training_run import REPOSITORY
from tests.unit.conversion.small_checkpoint import small_common
from tests.unit.interop.memory_source import MemorySource

GIBIBYTE = 1024**3
MODEL = """
    --num-layers 20 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 3072 --vocab-size 50256
    --make-vocab-size-divisible-by 128
"""
CONVERTER = REPOSITORY / "tools" / "checkpoint" / "convert.py"


class SyntheticSource(MemorySource):
    """Make the values of a checkpoint of 2 GB when they are asked for."""

    def __init__(self, has_flat_buffers: bool) -> None:
        common = small_common(MODEL)
        common["config"]["model"]["vocab_size"] = 50257
        common["config"]["ddp"]["use_distributed_optimizer"] = has_flat_buffers
        super().__init__({}, common)
        config = RunConfig.from_dict(common["config"]).model
        rng = RngStreams(Device("cpu"), 1, ONE_RANK.place())
        model = GPTModel(config, single_rank_group(), rng, seed=1, device="meta")
        self.infos = {
            f"{prefix}.{spec_of(parameter).name}": TensorInfo(spec_of(parameter).global_shape, torch.float32)
            for parameter in model.parameters()
            for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        }

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.infos

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        assert box is None
        generator = torch.Generator().manual_seed(len(name))
        return torch.rand(self.infos[name].global_shape, generator=generator)


def peak_of(command: Sequence[str | Path]) -> int:
    """Run a command and return the most memory that it held, in bytes."""
    process = subprocess.Popen([sys.executable, *map(str, command)], env={**os.environ, "OMP_NUM_THREADS": "2"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.fixture
def synthetic(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int, int]:
    """Return the folder of a checkpoint, its bytes and those of its largest tensor."""
    source = SyntheticSource(has_flat_buffers=request.param == "flat")
    write_native(source, tmp_path / "native", 3)
    sizes = [info.num_bytes for info in source.tensors.values()]
    return tmp_path / "native", sum(sizes), max(sizes)


def convert(origin: Path, result: Path, bound: int, *more: str) -> None:
    peak = peak_of([CONVERTER, "--load-dir", origin, "--save-dir", result, *" ".join(more).split()])
    print(f"{' '.join(more)}: peak {peak / 1e6:.0f} MB of {bound / 1e6:.0f} MB allowed")
    assert peak <= bound


@pytest.mark.long
@pytest.mark.parametrize("synthetic", ["plain"], indirect=True)
def test_between_formats_and_layouts(synthetic: tuple[Path, int, int], tmp_path: Path) -> None:
    native, total, largest = synthetic
    bound = 2 * largest + GIBIBYTE
    assert bound < total, "a converter that held the whole checkpoint would pass"
    convert(native, tmp_path / "tp4", bound, "--target-tensor-parallel-size 4")
    convert(native, tmp_path / "torch", bound, "--saver torch --target-tensor-parallel-size 2")
    convert(tmp_path / "torch", tmp_path / "back", bound, "--loader torch --saver native")
    convert(native, tmp_path / "hf", bound, "--saver hf")
    convert(tmp_path / "hf", tmp_path / "from_hf", bound, "--loader hf")


@pytest.mark.long
@pytest.mark.parametrize("synthetic", ["flat"], indirect=True)
def test_flat_optimizer_buffers(synthetic: tuple[Path, int, int], tmp_path: Path) -> None:
    native, total, _ = synthetic
    # The largest tensor of such a file is one moment of every parameter.
    bound = 2 * total // 3 + GIBIBYTE
    convert(native, tmp_path / "torch", bound, "--saver torch --target-tensor-parallel-size 1")
    assert (tmp_path / "torch" / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt").is_file()
    convert(tmp_path / "torch", tmp_path / "back", bound, "--loader torch --saver native")
