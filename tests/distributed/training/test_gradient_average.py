"""How replicas average gradients, and auxiliary losses of any layer at any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import CollectiveCall
from megatron.training import model_setup
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.run_cell import (
    CPU,
    CellResult,
    Fragment,
    assemble,
    compare,
    gradient_floor,
    resolve_cell,
    run_cell,
)
from tests.harness.distributed import run_distributed
from tests.harness.penalized_layers import provide_penalized_gpt
from tests.unit.core.distributed.toy_model import ToyModel, batch

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
LAYOUTS = {
    "dp2": (2, ""),
    "dp2-sharded": (2, "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"),
    "dp2-pp2": (4, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "experts": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "fp8": (
        2,
        "--bf16 --fp8-format hybrid --fp8-recipe delayed --hidden-size 64 --ffn-hidden-size 96 --seq-length 32 "
        "--max-position-embeddings 32",
    ),
}


def train(flags: str, world_size: int, dtype: str, divides_loss: bool) -> CellResult:
    """Train a few steps; with ``divides_loss`` as a run does, without it with gradients averaged in a pass."""
    words = (*BASE_FLAGS, *flags.split())
    with contextlib.ExitStack() as stack:
        if not divides_loss:
            stack.enter_context(patch.object(model_setup, "num_replicas_in_loss", lambda config, num_replicas: 1))
        return run_cell(words, world_size, "plain", dtype, pretrain_gpt.provide_model, pretrain_gpt.forward_step)


def assert_equal(left: Sequence[Fragment], right: Sequence[Fragment]) -> None:
    """Assert that both hold the same bits."""
    assert left
    for one, other in zip(left, right, strict=True):
        assert (one.name, one.box) == (other.name, other.box)
        assert np.array_equal(one.values, other.values), one.name


@pytest.mark.default(2)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "bfloat16") for layout in LAYOUTS),
        *(pytest.param(layout, "float32", marks=pytest.mark.long) for layout in LAYOUTS if layout != "fp8"),
    ],
)
def test_dividing_the_loss_changes_no_bit(layout: str, dtype: str) -> None:
    world_size, flags = LAYOUTS[layout]
    divided = run_distributed(world_size, train, flags, world_size, dtype, True, timeout_s=60)
    averaged = run_distributed(world_size, train, flags, world_size, dtype, False, timeout_s=60)
    for mine, other in zip(divided, averaged, strict=True):
        assert mine.losses == other.losses
        assert mine.grad_norms == other.grad_norms
        assert_equal(mine.gradients, other.gradients)
        assert_equal(mine.parameters, other.parameters)


def reductions_on_nccl(options: dict[str, object]) -> set[str]:
    """Return how gradients are reduced over the replicas if the backend says that it is NCCL."""
    calls: list[CollectiveCall] = []
    state = create_parallel_state(observer=calls.append)
    with patch.object(dist, "get_backend", lambda group=None: "nccl"):
        ddp = DistributedDataParallel(ToyModel(), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
        ddp.zero_grad_buffer()
        ddp(*batch(state.rank)).backward()
        ddp.finish_grad_sync()
    return {call.reduction for call in calls if call.operation in ("all_reduce", "reduce_scatter")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "sum"),
        ({"use_distributed_optimizer": True}, "sum"),
        ({"ddp_average_in_collective": True}, "avg"),
    ],
)
def test_nccl_sums_unless_the_collective_is_to_average(options: dict[str, object], expected: str) -> None:
    assert run_distributed(2, reductions_on_nccl, options) == [{expected}] * 2


def average_of_buffers(flags: str) -> tuple[int, set[bool]]:
    """Return by how many replicas a run divides its loss, and whether its gradient buffers average then."""
    config = resolve_cell((*BASE_FLAGS, *flags.split()), 2, "float16" if "--fp16" in flags else "bfloat16")
    runtime = make_runtime(config, CPU)
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    buffers = [buffer for chunk in parts.ddp_chunks for buffer in chunk.grad_buffers]
    return parts.num_replicas_in_loss, {buffer.plan.average for buffer in buffers}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (2, {False})),
        ("--ddp-average-in-collective", (1, {True})),
        ("--calculate-per-token-loss", (1, {False})),
        ("--fp16", (1, {True})),
    ],
)
def test_a_run_divides_its_loss_or_averages_its_buffers(flags: str, expected: tuple[int, set[bool]]) -> None:
    assert run_distributed(2, average_of_buffers, flags) == [expected] * 2


def test_three_replicas_average_their_gradients() -> None:
    config = resolve_cell((*BASE_FLAGS, "--global-batch-size", "9"), 3, "float32")
    counts = [model_setup.num_replicas_in_loss(config, number) for number in (1, 2, 3, 4, 6, 64)]
    assert counts == [1, 2, 1, 4, 1, 64]


TOLERANCE = 1e-9
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
AUXILIARY_LAYOUTS = {
    "recompute": (1, f"{RECOMPUTE} 3"),
    "pp2-recompute": (2, f"--pipeline-model-parallel-size 2 {RECOMPUTE} 1"),
    "pp2-zero-bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
    "pp2-interleaved": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def train_with_auxiliary_losses(flags: str, world_size: int) -> CellResult:
    words = (*BASE_FLAGS, *flags.split())
    return run_cell(words, world_size, "plain", "float64", provide_penalized_gpt, pretrain_gpt.forward_step)


@pytest.mark.full
@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.long), "--calculate-per-token-loss"])
def test_gradients_are_those_of_one_process(more: str) -> None:
    expected = train_with_auxiliary_losses(more, 1)
    reference = assemble(expected.gradients)
    for name, (world_size, flags) in AUXILIARY_LAYOUTS.items():
        ranks = run_distributed(world_size, train_with_auxiliary_losses, f"{flags} {more}", world_size)
        fragments = [fragment for rank in ranks for fragment in rank.gradients]
        mismatches, _ = compare(fragments, reference, TOLERANCE, gradient_floor(reference))
        assert not mismatches, (name, mismatches[0].describe())
        assert ranks[0].losses == pytest.approx(expected.losses, rel=TOLERANCE), name


def test_the_loss_that_is_minimized_is_not_the_plain_one() -> None:
    plain = run_cell(BASE_FLAGS, 1, "plain", "float64", pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    penalized = train_with_auxiliary_losses("", 1)
    assert penalized.losses[0] == plain.losses[0]
    assert penalized.grad_norms[0] != pytest.approx(plain.grad_norms[0], rel=1e-3)
