"""The distributed optimizer and sharded gradients against the plain optimizer, which is their oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.dist_checkpointing.index import read_index
from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import MODEL_PREFIX, OPTIMIZER_PREFIX, model_tensors, optimizer_tensors
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import TrainingError
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.optimizer import inner_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, make_optimizer
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import create_parallel_state
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    IN_STEP,
    OPTIM,
    OVERLAP,
    WEIGHTS,
    Options,
    Run,
    Wide,
    build,
    trained_each,
)
from tests.harness.distributed import RankFailure, run_distributed
from tests.unit.core.dist_checkpointing.toy import save_tensors
from tests.unit.core.distributed.toy_model import batch


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("world_size", "cp", "per_token"),
    [
        *(pytest.param(2, 1, per_token, marks=pytest.mark.long) for per_token in (False, True)),
        *((4, 2, False), (4, 1, True)),
    ],
)
def test_any_sharding_trains_as_no_sharding(world_size: int, cp: int, per_token: bool) -> None:
    variants = [
        {},
        OPTIM,
        OPTIM | OVERLAP,
        OPTIM | OVERLAP | GATHER,
        OPTIM | {"ddp_average_in_collective": True},
        GRADS,
        GRADS | OVERLAP,
        GRADS | OVERLAP | GATHER | {"check_for_nan_in_loss_and_grad": False},
        {"data_parallel_sharding_strategy": "optim_grads", "ddp_average_in_collective": True},
        WEIGHTS,
        WEIGHTS | OVERLAP,
    ]
    ranks = run_distributed(world_size, trained_each, variants, per_token=per_token, cp=cp)
    expected, expected_outcomes, plain = ranks[0][0]
    assert plain is MegatronOptimizer
    for number in range(1, len(variants)):
        for rank in ranks:
            parameters, outcomes, kind = rank[number]
            assert kind is DistributedOptimizer
            assert outcomes == ranks[0][number][1]
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)
                assert torch.equal(parameter, ranks[0][number][0][name])
            for outcome, wanted in zip(outcomes, expected_outcomes, strict=True):
                assert outcome.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-12)
                assert outcome.num_zeros == wanted.num_zeros


@pytest.mark.default(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_clipping_the_update_is_bitwise_the_same(dtype: torch.dtype) -> None:
    """Two ranks add the same two numbers however they are reduced; only the norm is summed in another order."""
    variants = [{}, OPTIM, OPTIM | OVERLAP | GATHER, OPTIM | OVERLAP | IN_STEP]
    for (expected, _, _), *others in run_distributed(
        2, trained_each, variants, dtype=dtype, optimizer={"clip_grad": 0.0}
    ):
        for parameters, _, _ in others:
            assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())


@pytest.mark.default(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_overlap_changes_no_bit(strategy: str) -> None:
    # Gathering piecewise gives the first one the same buckets.
    base: Options = {"data_parallel_sharding_strategy": strategy, **GATHER}
    variants = [base, base | OVERLAP, base | IN_STEP]
    for apart, *others in run_distributed(2, trained_each, variants, dtype=torch.float32):
        for together in others:
            assert apart[1] == together[1]
            assert all(torch.equal(apart[0][name], parameter) for name, parameter in together[0].items())


@pytest.mark.default(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.0)])
def test_sharded_weights_change_no_more_than_the_order_of_sums(dtype: torch.dtype, tolerance: float) -> None:
    # Shards are cut layer by layer, so that the squares of the norm are added in another order.
    for (expected, outcomes, _), *others in run_distributed(
        4, trained_each, [GRADS, WEIGHTS, WEIGHTS | OVERLAP], dtype=dtype
    ):
        for parameters, found, _ in others:
            assert [each.num_zeros for each in found] == [each.num_zeros for each in outcomes]
            norms = [each.grad_norm for each in outcomes]
            assert [each.grad_norm for each in found] == pytest.approx(norms, rel=tolerance, abs=0)
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, expected[name], rtol=tolerance, atol=tolerance)


def events_of_a_step(options: Options) -> list[str]:
    """Return which updates and gathers a step makes, in their order."""
    run = build(options, state=create_parallel_state(observer=lambda call: events.append(call.operation)))
    events: list[str] = []
    run.step(0)
    run.ddp.finish_param_gather()
    step_if = InnerOptimizer.step_if

    def noted(*arguments: Any) -> None:
        events.append("update")
        step_if(*arguments)

    events.clear()
    with patch.object(InnerOptimizer, "step_if", noted):
        run.step(1)
    return [event for event in events if event in ("update", "all_gather")]


def test_each_bucket_is_gathered_while_the_next_is_updated() -> None:
    for events in run_distributed(2, events_of_a_step, OPTIM | GATHER):
        assert events == ["update", *["all_gather"] * (len(events) - 1)]
    for events in run_distributed(2, events_of_a_step, OPTIM | IN_STEP):
        assert len(events) >= 6
        assert events == ["update", "all_gather"] * (len(events) // 2)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("dtype", "in_bf16"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_half_precisions_train_as_without_sharding(dtype: torch.dtype, in_bf16: bool) -> None:
    variants = [
        options | {"grad_reduce_in_bf16": in_bf16} for options in ({}, OPTIM, GRADS, GRADS | OVERLAP | GATHER, WEIGHTS)
    ]
    settings = {"dtype": dtype, "optimizer": {"initial_loss_scale": 2.0**6}}
    ranks = run_distributed(2, trained_each, variants, **settings)
    for (expected, outcomes, _), *others in ranks:
        for number, (parameters, found, _) in enumerate(others, start=1):
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, expected[name], rtol=0.02, atol=0.01)
                assert torch.equal(parameter, ranks[0][number][0][name])
            for outcome, wanted in zip(found, outcomes, strict=True):
                assert outcome.grad_norm == pytest.approx(wanted.grad_norm, rel=0.05 if in_bf16 else 1e-2)


def test_sgd_is_sharded_too() -> None:
    settings = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.8}}
    for (expected, _, _), (parameters, _, _) in run_distributed(2, trained_each, [{}, GRADS], **settings):
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)


def described(run: Run) -> list:
    run.ddp.finish_param_gather()
    return model_tensors([run.ddp.module]) + optimizer_tensors(run.optimizer)


def train_and_save(
    folder: str, options: Options, dtype: torch.dtype, optimizer: Options | None = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train two steps, save, and train one more; return the weights then and the outcome of the last step."""
    run = build(options, dtype=dtype, optimizer=optimizer)
    for number in range(2):
        run.step(number)
    save_tensors(Path(folder), described(run), {"scalars": run.optimizer.scalar_state()}, run.state)
    outcome = run.step(2)
    return run.parameters(), outcome


def load_and_train(
    folder: str, options: Options, dtype: torch.dtype, optimizer: Options | None = None
) -> tuple[dict[str, torch.Tensor], Any]:
    run = build(options, dtype=dtype, optimizer=optimizer)
    run.step(7)  # whatever is there is replaced
    index = load_index(Path(folder), run.state.world)
    load_tensors(Path(folder), index, described(run), (MODEL_PREFIX, OPTIMIZER_PREFIX), run.state)
    run.optimizer.load_scalar_state(index.common["scalars"])
    outcome = run.step(2)
    return run.parameters(), outcome


def load_each_and_train(
    folders: list[str], options: Options, dtype: torch.dtype
) -> list[tuple[dict[str, torch.Tensor], Any]]:
    return [load_and_train(folder, options, dtype) for folder in folders]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [(OPTIM, torch.float32), (GRADS | OVERLAP | GATHER, torch.bfloat16), (WEIGHTS | OVERLAP, torch.bfloat16)],
    ids=["optim", "grads", "weights"],
)
def test_resuming_at_the_same_layout_is_bitwise_exact(tmp_path: Path, options: Options, dtype: torch.dtype) -> None:
    saved = run_distributed(4, train_and_save, str(tmp_path), options, dtype)
    loaded = run_distributed(4, load_and_train, str(tmp_path), options, dtype)
    for (parameters, outcome), (expected, wanted) in zip(loaded, saved, strict=True):
        assert outcome == wanted
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.long), torch.bfloat16])
def test_a_checkpoint_loads_at_any_sharding(tmp_path: Path, dtype: torch.dtype) -> None:
    """What is saved at one layout goes on at every other as it would have where it was saved."""
    layouts: list[tuple[int, Options]] = [(4, OPTIM), (2, GRADS | GATHER), (1, {}), (2, {}), (2, WEIGHTS)]
    folders = [str(tmp_path / str(source)) for source in range(len(layouts))]
    saved = []
    for folder, (world_size, options) in zip(folders, layouts):
        Path(folder).mkdir()
        saved.append(run_distributed(world_size, train_and_save, folder, options, dtype)[0])
    rel, rtol, atol = (1e-12, 1e-12, 1e-13) if dtype is torch.float64 else (1e-2, 0.01, 0.004)
    for world_size, options in layouts:
        for loaded in run_distributed(world_size, load_each_and_train, folders, options, dtype):
            for (parameters, outcome), (expected, wanted) in zip(loaded, saved, strict=True):
                assert outcome.grad_norm == pytest.approx(wanted.grad_norm, rel=rel)
                for name, parameter in parameters.items():
                    torch.testing.assert_close(parameter, expected[name], rtol=rtol, atol=atol)


def poisoned(options: Options, dtype: torch.dtype, bad_rank: int) -> tuple[StepOutcome, bool]:
    """Let one rank bring a gradient that is not finite in its first micro-batch."""
    run = build(options, dtype=dtype, optimizer={"initial_loss_scale": 4.0, "hysteresis": 1})
    run.step(0)
    before = run.parameters()
    run.ddp.zero_grad_buffer()
    for last in (False, True):
        loss = run.ddp(*batch(run.state.rank))
        if run.state.rank == bad_rank and not last:
            loss = loss + run.ddp.module.fc1_bias[3] * float("inf")
        if last:
            loss.backward()
        else:
            with run.ddp.no_sync():
                loss.backward()
    finalize_model_grads([run.ddp], run.state)
    outcome = run.optimizer.step()
    return outcome, all(torch.equal(before[name], p) for name, p in run.parameters().items())


@pytest.mark.parametrize("options", [OPTIM, GRADS | OVERLAP, WEIGHTS], ids=["optim", "grads", "weights"])
def test_the_rank_with_a_bad_gradient_is_named(options: Options) -> None:
    with pytest.raises(RankFailure, match=r"rank 2: fc1\.bias; --no-check") as caught:
        run_distributed(4, poisoned, options, torch.bfloat16, 2)
    assert isinstance(caught.value.__cause__, TrainingError)


@pytest.mark.parametrize("options", [OPTIM, GRADS | OVERLAP | GATHER, WEIGHTS], ids=["optim", "grads", "weights"])
def test_an_overflow_skips_the_step_on_all_ranks(options: Options) -> None:
    for outcome, is_unchanged in run_distributed(2, poisoned, options, torch.float16, 1):
        assert outcome == StepOutcome(False, None, None)
        assert is_unchanged


def with_rule(rule: str, work: Any, *arguments: Any) -> Any:
    """Return what work gives if torch's optimizer of a name is the update rule."""
    make = getattr(torch.optim, rule)
    with (
        patch.object(inner_optimizer, "_make_torch_optimizer", lambda config, groups, fused: make(groups)),
        patch.object(inner_optimizer, "_state_names", lambda config: ()),
    ):
        return work(*arguments, {"optimizer": "added"})


@pytest.mark.full
def test_the_state_of_any_elementwise_rule_is_loaded_at_another_layout(tmp_path: Path) -> None:
    arguments = (str(tmp_path), OPTIM, torch.float32)
    ((expected, _), *_) = run_distributed(2, with_rule, "NAdam", train_and_save, *arguments)
    index = read_index(tmp_path)
    scalars = [name for name in index.tensors if name.startswith("optimizer.mu_product.")]
    assert len(scalars) == len(expected)
    for parameters, _ in run_distributed(3, with_rule, "NAdam", load_and_train, str(tmp_path), GRADS, torch.float32):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


def build_wide(optimizer: Options) -> None:
    state = create_parallel_state(ParallelSizes())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(Wide(torch.float32), config, state)
    make_optimizer(OptimizerConfig(**optimizer), [ddp], state)  # type: ignore[arg-type]


def test_a_rule_that_is_not_elementwise_is_given_no_shard() -> None:
    with pytest.raises(RankFailure, match=r"Adafactor is not elementwise.*some rank holds a shard of matrix") as caught:
        run_distributed(2, with_rule, "Adafactor", build_wide)
    assert "ConfigurationError" in str(caught.value)
