"""The optimizer over several ranks, with offload and state in few bytes too: the same training as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import TrainingError
from megatron.core.main_grad import main_grad_of
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, attach_spec, even_shards
from megatron.core.tensor_parallel.sharded_layers import replicated_spec
from tests.distributed.core.optimizer.test_distrib_optimizer import load_and_train, train_and_save
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    OPTIM,
    OVERLAP,
    Options,
    Trained,
    trained,
)
from tests.harness.distributed import RankFailure, run_distributed
from tests.unit.core.distributed.toy_model import ToyModel, batch

NUM_STEPS = 4
NUM_MICROBATCHES = 4


def trained_on_ranks(overlap: bool) -> tuple[dict[str, torch.Tensor], list[StepOutcome]]:
    """Train the toy model on micro-batches dealt over the replicas."""
    state = create_parallel_state()
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, ddp_bucket_size=65)
    ddp = DistributedDataParallel(ToyModel(), config, state)
    options = OptimizerConfig(
        lr=0.01, clip_grad=0.4, weight_decay=0.1, params_dtype="float64", log_num_zeros_in_grad=True
    )
    optimizer = MegatronOptimizer(options, [ddp], state)
    outcomes = []
    for step in range(NUM_STEPS):
        ddp.zero_grad_buffer()
        mine = range(state.dp.rank, NUM_MICROBATCHES, state.dp.size)
        for index in mine:
            loss = ddp(*batch(step * NUM_MICROBATCHES + index)) / len(mine)
            if index == mine[-1]:
                loss.backward()
            else:
                with ddp.no_sync():
                    loss.backward()
        finalize_model_grads([ddp], state)
        outcomes.append(optimizer.step())
    return {name: p.detach() for name, p in ddp.module.named_parameters()}, outcomes


@pytest.mark.default(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_train_as_one_process_does(world_size: int, overlap: bool) -> None:
    ((expected, expected_outcomes),) = run_distributed(1, trained_on_ranks, False)
    results = run_distributed(world_size, trained_on_ranks, overlap)
    for parameters, outcomes in results:
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-13)
            assert torch.equal(parameter, results[0][0][name])
        assert outcomes == results[0][1]
        for outcome, wanted in zip(outcomes, expected_outcomes, strict=True):
            assert outcome.success
            assert outcome.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-12)
            assert outcome.num_zeros == wanted.num_zeros


class Pair(nn.Module):
    """Hold a matrix cut along its rows and a norm that every tensor-parallel rank holds."""

    def __init__(self, tp: Group, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (8, 3)
        self.matrix = nn.Parameter(torch.ones(shape[0] // tp.size, shape[1], dtype=dtype))
        self.norm = nn.Parameter(torch.ones(5, dtype=dtype))
        attach_spec(self.matrix, ParamSpec("matrix", shape, even_shards(shape, 0, tp.rank, tp.size)))
        attach_spec(self.norm, replicated_spec("norm", (5,), tp, partial_gradient=False))


def pair_on(
    tp_size: int, dtype: torch.dtype, dtype_name: str
) -> tuple[ParallelState, DistributedDataParallel, MegatronOptimizer]:
    state = create_parallel_state(ParallelSizes(tp=tp_size))
    ddp = DistributedDataParallel(Pair(state.tp, dtype), DistributedDataParallelConfig(), state)
    options = OptimizerConfig(
        lr=0.1, params_dtype=dtype_name, initial_loss_scale=8.0, hysteresis=1, log_num_zeros_in_grad=True
    )
    return state, ddp, MegatronOptimizer(options, [ddp], state)


def step_of_pair(tp_size: int) -> tuple[StepOutcome, float]:
    state, ddp, optimizer = pair_on(tp_size, torch.float64, "float64")
    ddp.zero_grad_buffer()
    matrix = torch.arange(24, dtype=torch.float64).view(8, 3)
    main_grad_of(ddp.module.matrix).add(matrix.chunk(tp_size)[state.tp.rank])
    main_grad_of(ddp.module.norm).add(torch.tensor([0.0, 4.0, 0.0, 1.0, 2.0]))
    finalize_model_grads([ddp], state)
    params_norm = optimizer.params_norm()
    return optimizer.step(), params_norm


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_every_element_counts_once_at_any_layout(world_size: int, tp_size: int) -> None:
    squares = sum(i * i for i in range(24)) + 16 + 1 + 4
    for outcome, params_norm in run_distributed(world_size, step_of_pair, tp_size):
        assert outcome.grad_norm == pytest.approx(squares**0.5, rel=1e-12)
        assert outcome.num_zeros == 3
        assert params_norm == pytest.approx(29**0.5, rel=1e-12)


def step_with_bad_gradient(bad_rank: int, dtype: torch.dtype, dtype_name: str) -> tuple[StepOutcome, float, bool]:
    state, ddp, optimizer = pair_on(2, dtype, dtype_name)
    ddp.zero_grad_buffer()
    grads = [torch.ones_like(p) for p in ddp.module.parameters()]
    if state.rank == bad_rank:
        grads[0][1, 2] = float("nan")
    for parameter, grad in zip(ddp.module.parameters(), grads, strict=True):
        main_grad_of(parameter).add(grad)
    finalize_model_grads([ddp], state)
    outcome = optimizer.step()
    return outcome, optimizer.loss_scale, bool(all(p.eq(1.0).all() for p in ddp.parameters()))


@pytest.mark.parametrize("bad_rank", [1, 2])
def test_the_rank_that_brought_a_bad_gradient_is_named_on_every_rank(bad_rank: int) -> None:
    with pytest.raises(RankFailure, match=rf"rank {bad_rank}: matrix; .*; pass --no-check") as caught:
        run_distributed(4, step_with_bad_gradient, bad_rank, torch.bfloat16, "bfloat16")
    assert isinstance(caught.value.__cause__, TrainingError)
    for rank in set(range(4)) - {caught.value.rank}:
        assert f"rank {rank} raised: megatron.core.errors.TrainingError" in str(caught.value)


def test_a_float16_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for outcome, scale, is_unchanged in run_distributed(4, step_with_bad_gradient, 3, torch.float16, "float16"):
        assert outcome == StepOutcome(False, None, None)
        assert scale == 4.0
        assert is_unchanged


HALF: Options = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "initial_loss_scale": 2.0**6,
}
PLAIN: Options = {"initial_loss_scale": 2.0**6}
NARROW: Options = {
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp16",
    "exp_avg_sq_dtype": "fp16",
}
SMALLEST: Options = NARROW | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}


def trained_with_each(options: Options, optimizers: list[Options], **settings: Any) -> list[Trained]:
    return [trained(options, optimizer=optimizer, **settings) for optimizer in optimizers]


@pytest.mark.default(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, OPTIM, GRADS | OVERLAP | GATHER], ids=["whole", "optim", "grads"])
def test_offload_computes_the_same_bits(options: Options, dtype: torch.dtype) -> None:
    for expected, *others in run_distributed(
        2, trained_with_each, options, [PLAIN, HALF, HALF | {"optimizer_offload_fraction": 1.0}], dtype=dtype
    ):
        for parameters, outcomes, kind in others:
            assert (outcomes, kind) == expected[1:]
            assert all(torch.equal(parameter, expected[0][name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("narrow", [NARROW, SMALLEST], ids=["fp16", "fp8"])
def test_state_in_few_bytes_does_not_depend_on_the_sharding(narrow: Options) -> None:
    settings = {"dtype": torch.bfloat16, "optimizer": {"clip_grad": 0.0, **narrow}}
    (whole, *_), *_ = run_distributed(2, trained, {}, **settings)
    (shards, *_), *_ = run_distributed(2, trained, OPTIM, **settings)
    assert all(torch.equal(parameter, shards[name]) for name, parameter in whole.items())


def save_with(optimizer: Options, folder: str, options: Options) -> Any:
    return train_and_save(folder, options, torch.bfloat16, optimizer)


def load_with(optimizer: Options, folder: str, options: Options) -> Any:
    return load_and_train(folder, options, torch.bfloat16, optimizer)


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), OPTIM], ids=["whole", "optim"])
@pytest.mark.parametrize(
    ("saver", "loader"), [(HALF, PLAIN), (PLAIN, HALF), (HALF, HALF), (NARROW, NARROW), (SMALLEST, SMALLEST)]
)
def test_resuming_with_and_without_is_bitwise_exact(
    tmp_path: Path, options: Options, saver: Options, loader: Options
) -> None:
    saved = run_distributed(2, save_with, saver, str(tmp_path), options)
    loaded = run_distributed(2, load_with, loader, str(tmp_path), options)
    for (parameters, outcome), (expected, wanted) in zip(loaded, saved, strict=True):
        assert outcome == wanted
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())


@pytest.mark.default(1)
@pytest.mark.parametrize("saver", [HALF, NARROW], ids=["offload", "narrow"])
def test_a_checkpoint_loads_at_another_layout(tmp_path: Path, saver: Options) -> None:
    saved = run_distributed(4, save_with, saver, str(tmp_path), OPTIM)
    for world_size, options, loader in ((1, {}, PLAIN), (2, GRADS | GATHER, HALF), (1, {}, NARROW)):
        for parameters, outcome in run_distributed(world_size, load_with, loader, str(tmp_path), options):
            assert outcome.grad_norm == pytest.approx(saved[0][1].grad_norm, rel=1e-2)
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, saved[0][0][name], rtol=0.01, atol=0.004)
