"""The distributed optimizer and sharded gradients against the plain optimizer, and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing.index import read_index
from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import MODEL_PREFIX, OPTIMIZER_PREFIX, model_tensors, optimizer_tensors
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fully_sharded_data_parallel import ShardedGradBuffer
from megatron.core.distributed.param_layout import PARAM_ALIGNMENT
from megatron.core.errors import TrainingError
from megatron.core.main_grad import main_grad_of
from megatron.core.optimizer import inner_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, make_optimizer
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import CollectiveCall, Group
from megatron.core.sharding import ParamSpec, attach_spec, even_shards, full_shards, held_of, tie_over_pipeline
from megatron.core.tensor_parallel.sharded_layers import replicated_spec
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    IN_STEP,
    NUM_MICROBATCHES,
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
from tests.unit.core.distributed.toy_model import ToyModel, batch


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
    with pytest.raises(RankFailure, match=r"rank 2: fc1\.bias; no parameter was changed; pass --no-check") as caught:
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
    with pytest.raises(RankFailure, match=r"Adafactor is not elementwise.*a rank has only a shard of matrix") as caught:
        run_distributed(2, with_rule, "Adafactor", build_wide)
    assert "ConfigurationError" in str(caught.value)


class TwoHeads(nn.Module):
    """Use other parameters on every other rank, so that buckets fill in different orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.toy = ToyModel()
        self.uses_all = rank % 2 == 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.uses_all:
            return self.toy(tokens, labels)
        return self.toy.norm.square().sum() + self.toy.fc1_bias.sum()


def train_two_heads(options: Options) -> dict[str, torch.Tensor]:
    state = create_parallel_state()
    ddp = DistributedDataParallel(TwoHeads(state.rank), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
    optimizer = make_optimizer(OptimizerConfig(lr=0.01, params_dtype="float64"), [ddp], state)
    for number in range(2):
        ddp.zero_grad_buffer()
        for _ in range(2):
            with ddp.no_sync():
                ddp(*batch(number)).backward()
        ddp(*batch(number + 5)).backward()
        finalize_model_grads([ddp], state)
        optimizer.step()
    ddp.finish_param_gather()
    return {name: p.detach() for name, p in ddp.module.named_parameters()}


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [OPTIM | OVERLAP, GRADS, GRADS | OVERLAP | {"ddp_bucket_size": 1}])
def test_parameters_unused_on_some_ranks_do_not_mix_collectives_up(options: Options) -> None:
    expected = run_distributed(2, train_two_heads, {})[0]
    for parameters in run_distributed(2, train_two_heads, options):
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)


class Pair(nn.Module):
    """Hold a matrix cut over the tensor-parallel ranks and a norm that each of them has a partial gradient of."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        shape = (62, 13)
        self.matrix = nn.Parameter(torch.ones(shape[0] // tp.size, shape[1], dtype=torch.float64))
        self.norm = nn.Parameter(torch.ones(301, dtype=torch.float64))
        attach_spec(self.matrix, ParamSpec("matrix.weight", shape, even_shards(shape, 0, tp.rank, tp.size)))
        attach_spec(self.norm, replicated_spec("norm.weight", (301,), tp, partial_gradient=True))


def step_of_pair(options: Options) -> tuple[float, float, int, torch.Tensor, torch.Tensor]:
    state = create_parallel_state(ParallelSizes(tp=2))
    ddp = DistributedDataParallel(Pair(state.tp), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
    config = OptimizerConfig(lr=0.1, params_dtype="float64", log_num_zeros_in_grad=True, clip_grad=2.0)
    optimizer = make_optimizer(config, [ddp], state)
    params_norm = optimizer.params_norm()
    ddp.zero_grad_buffer()
    matrix = torch.arange(62 * 13, dtype=torch.float64).view(62, 13) * (state.dp.rank + 1)
    main_grad_of(ddp.module.matrix).add(matrix.chunk(2)[state.tp.rank])
    main_grad_of(ddp.module.norm).add(torch.full((301,), state.rank - 1.0))
    finalize_model_grads([ddp], state)
    outcome = optimizer.step()
    ddp.finish_param_gather()
    parameters = [p.detach() for p in ddp.parameters()]
    return outcome.grad_norm, params_norm, outcome.num_zeros, *parameters


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [OPTIM, GRADS, GRADS | OVERLAP | GATHER])
def test_with_tensor_parallelism_partial_gradients_are_summed_and_each_element_counts_once(options: Options) -> None:
    expected = run_distributed(4, step_of_pair, {})
    matrix = torch.arange(62 * 13, dtype=torch.float64) * 1.5
    norm = (matrix.square().sum() + 301 * (((0 - 1 + 2 - 1) + (1 - 1 + 3 - 1)) / 2) ** 2).sqrt().item()
    for result, wanted in zip(run_distributed(4, step_of_pair, options), expected, strict=True):
        assert result[0] == pytest.approx(norm, rel=1e-12)
        assert wanted[0] == pytest.approx(norm, rel=1e-12)
        assert result[1] == pytest.approx((62 * 13 + 301) ** 0.5, rel=1e-12)
        assert result[2] == wanted[2] == 1
        for parameter, other in zip(result[3:], wanted[3:], strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-13)


class Stage(nn.Module):
    """Hold a word embedding's copy at both ends of a pipeline, beside weights that differ from stage to stage."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        rows = 31
        self.own = nn.Parameter(torch.ones(5 + 7 * state.pp.rank, 40, dtype=torch.float64))
        shape = tuple(self.own.shape)
        attach_spec(self.own, ParamSpec(f"stage{state.pp.rank}.weight", shape, full_shards(shape)))
        self.word: nn.Parameter | None = None
        if state.pp.is_first or state.pp.is_last:
            self.word = nn.Parameter(torch.ones(rows, 11, dtype=torch.float64))
            spec = ParamSpec("weight", (rows, 11), full_shards((rows, 11)))
            name = "embedding.word_embeddings.weight"
            attach_spec(self.word, tie_over_pipeline(spec, name=name, is_first_stage=state.pp.is_first))


def step_of_stages(folder: str, options: Options, pp: int) -> dict[str, Any]:
    state = create_parallel_state(ParallelSizes(pp=pp))
    chunks = [
        DistributedDataParallel(module, DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
        for module in (Stage(state), Wide(torch.float64))
    ]
    for parameter in chunks[1].parameters():
        attach_spec(parameter, parameter.spec.with_prefix(f"extra{state.pp.rank}."))
    config = OptimizerConfig(lr=0.1, params_dtype="float64", clip_grad=2.0)
    optimizer = make_optimizer(config, chunks, state)
    params_norm = optimizer.params_norm()
    for number in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for microbatch in range(3):
            for chunk in chunks:
                with chunk.no_sync():
                    for parameter in reversed(list(chunk.parameters())):
                        values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).cos()
                        main_grad_of(parameter).add(values * (1 + state.rank + microbatch + number))
        finalize_model_grads(chunks, state)
        outcome = optimizer.step()
    for chunk in chunks:
        chunk.finish_param_gather()
    tensors = model_tensors([chunk.module for chunk in chunks]) + optimizer_tensors(optimizer)
    save_tensors(Path(folder), tensors, {}, state)
    index = load_index(Path(folder), state.world)
    for tensor in tensors:
        tensor.data.fill_(-1.0)
    load_tensors(Path(folder), index, tensors, (MODEL_PREFIX, OPTIMIZER_PREFIX), state)
    return {
        "norms": (params_norm, outcome.grad_norm),
        "parameters": {p.spec.name: p.detach() for chunk in chunks for p in chunk.parameters()},
        "bytes": sum(shard.gradient.nbytes for c in chunks for b in c.grad_buffers for shard in b.bucket_shards),
        "whole_bytes": sum(8 * b.layout.num_elements for c in chunks for b in c.grad_buffers),
        "pools": [b.pool.num_allocated for c in chunks for b in c.grad_buffers if isinstance(b, ShardedGradBuffer)],
        "stored": sorted(index.tensors),
    }


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("world_size", "pp"), [*(pytest.param(*each, marks=pytest.mark.long) for each in ((4, 2), (6, 3))), (8, 2)]
)
@pytest.mark.parametrize("options", [OPTIM, GRADS | OVERLAP | {"ddp_bucket_size": 600}], ids=["optim", "grads-overlap"])
def test_pipelines_with_a_tied_embedding(world_size: int, pp: int, options: Options, tmp_path: Path) -> None:
    """Both copies get the sum of both gradients and count and are saved once; gradients may be sharded (pp 2, dp 4)."""
    folders = [tmp_path / name for name in ("plain", "sharded")]
    for folder in folders:
        folder.mkdir()
    expected = run_distributed(world_size, step_of_stages, str(folders[0]), {}, pp)
    results = run_distributed(world_size, step_of_stages, str(folders[1]), options, pp)
    word = "embedding.word_embeddings.weight"
    dp = world_size // pp
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-12)
        assert wanted["norms"][0] ** 2 == pytest.approx(_sum_of_squares(pp), rel=1e-12)
        assert result["stored"] == wanted["stored"]
        assert sum(word in name for name in result["stored"]) == 3
        for name, parameter in result["parameters"].items():
            torch.testing.assert_close(parameter, wanted["parameters"][name], rtol=1e-12, atol=1e-13)
        assert (word in result["parameters"]) == (rank // dp in (0, pp - 1))
        if word in result["parameters"]:
            assert torch.equal(result["parameters"][word], results[0]["parameters"][word])
        assert result["bytes"] == result["whole_bytes"] / dp
        assert all(0 < count <= 3 for count in result["pools"])


def _sum_of_squares(pp: int) -> float:
    """Return the squared norm of all stages' first weights, the tied one counted once."""
    ones = 31 * 11 + sum((5 + 7 * stage) * 40 for stage in range(pp))
    return ones + pp * 0.25 * (67 * 33 + 160 * 48 + 160 + 48)


def use_outside_its_module() -> None:
    """Use a parameter of a module that is not called, while its new values are on their way."""
    run = build(OPTIM | GATHER | {"ddp_bucket_size": 1})
    run.step(0)
    loss = run.ddp.module.fc2.square().sum()
    loss.backward()


def test_use_of_a_parameter_that_nobody_waited_for_is_refused() -> None:
    with pytest.raises(RankFailure, match="used outside its module's forward"):
        run_distributed(2, use_outside_its_module)


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the memory behind tensors, views counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def bytes_of_state(options: Options) -> dict[str, int]:
    state = create_parallel_state()
    ddp = DistributedDataParallel(Wide(torch.bfloat16), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
    optimizer = make_optimizer(OptimizerConfig(params_dtype="bfloat16"), [ddp], state)
    (buffer,) = ddp.grad_buffers
    held = [tensor for _, tensor in optimizer.sharded_state().values()]
    return {
        "num_parameters": sum(p.numel() for p in ddp.parameters()),
        "num_padded": buffer.layout.num_elements,
        "num_buckets": len(buffer.buckets),
        "weights": storage_bytes([*ddp.parameters(), *(v for p in ddp.parameters() for _, v in held_of(p))]),
        "gradients": buffer.grad_data.untyped_storage().nbytes(),
        "optimizer": storage_bytes(held),
    }


@pytest.mark.default(8)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_bytes_of_each_rank_equal_the_closed_form(world_size: int, strategy: str) -> None:
    """Assert 6 + 12/d bytes a parameter in bf16: 18 unsharded, 2 + 16/d with sharded gradients, 18/d with weights."""
    results = run_distributed(world_size, bytes_of_state, {"data_parallel_sharding_strategy": strategy})
    n, padded = results[0]["num_parameters"], results[0]["num_padded"]
    assert n <= padded < n + 4 * PARAM_ALIGNMENT + results[0]["num_buckets"] * PARAM_ALIGNMENT * world_size
    d = 1 if strategy == "no_shard" else world_size
    gradient_shards = d if strategy.startswith("optim_grads") else 1
    weight_shards = d if strategy == "optim_grads_params" else 1
    for held in results:
        assert held["weights"] == 2 * (padded if d > 1 else n) // weight_shards
        assert held["gradients"] == 4 * padded // gradient_shards
        # State has no padding: a rank's share differs from n/d by no more than the padding of its own shard.
        assert abs(held["optimizer"] - 12 * n / d) <= 12 * (padded - n)
        total = held["weights"] + held["gradients"] + held["optimizer"]
        assert abs(total - (2 / weight_shards + 4 / gradient_shards + 12 / d) * n) <= 18 * (padded - n)
    assert sum(held["optimizer"] for held in results) == 12 * n * (world_size if d == 1 else 1)


def bytes_sent(options: Options) -> tuple[dict[str, list[int]], int, int]:
    """Return the bytes of every collective of one iteration by kind, the buffer's length and its buckets."""
    sent: dict[str, list[int]] = {}

    def observe(call: CollectiveCall) -> None:
        sent.setdefault(call.operation, []).append(call.num_bytes)

    state = create_parallel_state()
    watched = {name: replace(getattr(state, name), observer=observe) for name in ("tp", "dp_cp", "pp", "world")}
    run = build(options, state=replace(state, **watched))
    run.step(0)
    run.ddp.finish_param_gather()
    sent.clear()
    run.step(1)
    run.ddp.finish_param_gather()
    (buffer,) = run.ddp.grad_buffers
    return sent, buffer.layout.num_elements, len(buffer.buckets)


@pytest.mark.default(4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("options", "rounds"),
    [(OPTIM, 1), (OPTIM | OVERLAP | GATHER, 1), (GRADS, None), (GRADS | OVERLAP | GATHER, None)],
    ids=["optim", "overlap", "grads", "grads-overlap"],
)
def test_each_collective_is_of_the_closed_forms_size(world_size: int, options: Options, rounds: int | None) -> None:
    """One reduce-scatter of the buffer (or one a micro-batch) and one all-gather; one all-reduce of the norm."""
    rounds = rounds or NUM_MICROBATCHES // world_size
    for sent, length, num_buckets in run_distributed(world_size, bytes_sent, options):
        assert len(sent["reduce_scatter"]) == rounds * num_buckets
        assert len(sent["all_gather"]) == num_buckets
        assert sum(sent["reduce_scatter"]) == rounds * 8 * length
        assert sum(sent["all_gather"]) == 8 * length
        assert sent["all_reduce"] == [16]
