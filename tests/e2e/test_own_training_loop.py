"""The example with a training loop of its own learns, and gives the same losses at any layout."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from tests.harness.distributed import run_distributed
from tests.harness.training_run import REPOSITORY, launch_prefix, run_command

EXAMPLE = REPOSITORY / "examples" / "own_training_loop.py"
ITERATIONS = 6


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_training_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(tp: int, dtype: torch.dtype) -> list[float]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    state = create_parallel_state(ParallelSizes(tp=min(tp, world_size)))
    given: list[float] = load_example().train(state, EXAMPLE.read_bytes(), ITERATIONS, "cpu", dtype)
    return given


@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (2, 1), (4, 2)])
def test_losses_are_those_of_one_process(world_size: int, tp: int) -> None:
    alone = losses(1, torch.float64)
    assert alone[-1] < alone[0] - 0.5
    for given in run_distributed(world_size, losses, tp, torch.float64, timeout_s=60.0):
        assert given == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("nproc", [pytest.param(nproc, marks=pytest.mark.long) for nproc in (1, 2)])
def test_the_command_prints_the_losses_of_one_process(nproc: int) -> None:
    words = ("--tensor-model-parallel-size", str(nproc), "--iterations", str(ITERATIONS))
    result = run_command([*launch_prefix(nproc), EXAMPLE, *words], env={"CUDA_VISIBLE_DEVICES": ""}).check()
    printed = [float(loss) for loss in re.findall(r"^iteration \d+: loss (\S+)$", result.stdout, re.M)]
    assert printed == pytest.approx(losses(1, torch.float32), rel=1e-5)
