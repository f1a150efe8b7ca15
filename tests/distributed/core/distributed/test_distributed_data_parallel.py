"""Replicas against one process; parameters arrive during the forward pass, gradients leave during the backward."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fully_sharded_data_parallel import ShardedGradBuffer
from megatron.core.distributed.weight_checks import check_replicas_equal
from megatron.core.errors import TrainingError
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import CollectiveCall
from megatron.core.sharding import ParamSpec, attach_spec, full_shards, held_of, spec_of
from megatron.training.fault_tolerance.step_replay import RankTrace, StepTrace, ranks_that_differ
from tests.harness.distributed import RankFailure, run_distributed
from tests.unit.core.distributed.toy_model import ToyModel, autograd_gradients, batch

MICROBATCHES_PER_RANK = 3


def local_batches(rank: int) -> list[int]:
    return [rank * MICROBATCHES_PER_RANK + i for i in range(MICROBATCHES_PER_RANK)]


def naive_gradients(state: ParallelState, divisor: float, average: bool) -> dict[str, torch.Tensor]:
    """Return autograd's gradients of this rank, reduced over the replicas one by one."""
    gradients = autograd_gradients(local_batches(state.rank), divisor)
    for gradient in gradients.values():
        all_reduce(gradient, state.dp_cp)
        if average:
            gradient /= state.dp_cp.size
    return gradients


def reduced_gradients(
    iterations: int, per_token: bool, context_parallel_size: int, options: dict[str, object]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return this rank's final main gradients, the naive twin's, and the number of buckets."""
    state = create_parallel_state(ParallelSizes(cp=context_parallel_size))
    ddp = DistributedDataParallel(
        ToyModel(), DistributedDataParallelConfig(**options), state, calculate_per_token_loss=per_token
    )
    divisor = 1.0 if per_token else float(MICROBATCHES_PER_RANK)
    for _ in range(iterations):
        ddp.zero_grad_buffer()
        indices = local_batches(state.rank)
        with ddp.no_sync():
            for index in indices[:-1]:
                (ddp(*batch(index)) / divisor).backward()
        (ddp(*batch(indices[-1])) / divisor).backward()
        tokens = torch.tensor(7 * MICROBATCHES_PER_RANK) if per_token else None
        finalize_model_grads([ddp], state, tokens)
    mine = {name: main_grad_of(parameter).tensor for name, parameter in ddp.module.named_parameters()}
    naive = naive_gradients(state, divisor, average=not per_token)
    if per_token:
        for gradient in naive.values():
            gradient /= 7 * MICROBATCHES_PER_RANK * state.dp_cp.size
    return mine, naive, len(ddp.grad_buffers[0].buckets)


@pytest.mark.default(7)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("options", "num_buckets"),
    [
        ({}, 1),
        ({"overlap_grad_reduce": True}, 1),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 65}, 3),
        ({"ddp_average_in_collective": True, "check_for_nan_in_loss_and_grad": False}, 1),
    ],
)
@pytest.mark.parametrize(("world_size", "cp"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.long), (4, 2)])
def test_replicas_equal_one_process_and_the_naive_twin(
    world_size: int, cp: int, options: dict[str, object], num_buckets: int, per_token: bool
) -> None:
    results = run_distributed(world_size, reduced_gradients, 2, per_token, cp, options)
    all_batches = [index for rank in range(world_size) for index in local_batches(rank)]
    divisor = len(all_batches) * (7.0 if per_token else 1.0)
    expected = autograd_gradients(all_batches, divisor)
    for mine, naive, buckets in results:
        assert buckets == num_buckets
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradient, naive[name], rtol=1e-13, atol=1e-15)
            assert torch.equal(gradient, results[0][0][name])


def started_reductions() -> dict[str, tuple[int, list[str]]]:
    """Return how many reductions a backward pass starts, and how each reduces, by what is asked for."""
    calls: list[CollectiveCall] = []
    state = create_parallel_state(observer=calls.append)
    found = {}
    for name, options, per_token in (
        ("at the end", {"ddp_bucket_size": 65}, False),
        ("overlapping", {"ddp_bucket_size": 65, "overlap_grad_reduce": True}, False),
        ("averaged by the collective", {"ddp_average_in_collective": True}, False),
        ("summed over tokens", {"ddp_average_in_collective": True}, True),
    ):
        config = DistributedDataParallelConfig(**options)
        ddp = DistributedDataParallel(ToyModel(), config, state, calculate_per_token_loss=per_token)
        calls.clear()
        ddp(*batch(state.rank)).backward()
        num_started = len(calls)
        ddp.finish_grad_sync()
        assert all(call.operation == "all_reduce" for call in calls)
        found[name] = num_started, [call.reduction for call in calls]
    return found


def test_buckets_are_reduced_when_and_as_the_options_say() -> None:
    for found in run_distributed(2, started_reductions):
        assert found == {
            "at the end": (0, ["sum"]),
            # The bucket of the parameter without a gradient comes with the end.
            "overlapping": (1, ["sum"] * 3),
            "averaged by the collective": (0, ["avg"]),
            "summed over tokens": (0, ["sum"]),
        }


class TwoHeads(nn.Module):
    """Use one of two heads, a different one on each rank, so that buckets fill in different orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.toy = ToyModel()
        self.uses_fc2 = rank % 2 == 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.uses_fc2:
            return self.toy(tokens, labels)
        return self.toy.norm.square().sum() + self.toy.fc1_bias.sum()


def reduce_with_parameters_unused_on_some_ranks() -> dict[str, torch.Tensor]:
    state = create_parallel_state()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1)
    ddp = DistributedDataParallel(TwoHeads(state.rank), config, state, calculate_per_token_loss=True)
    ddp.zero_grad_buffer()
    ddp(*batch(state.rank)).backward()
    ddp.finish_grad_sync()
    return {name: main_grad_of(p).tensor for name, p in ddp.module.toy.named_parameters()}


class OneExpert(nn.Module):
    """A dense weight and an expert's weight, both larger than the gradients whose norms are recorded in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(4, 5))
        for name, weight in self.named_parameters():
            attach_spec(weight, ParamSpec(name, (4, 5), full_shards((4, 5)), is_expert=name == "expert"))

    def forward(self, factor: float) -> torch.Tensor:
        return factor * (self.dense + self.expert).sum()


def traces_with_experts() -> tuple[list[RankTrace], list[RankTrace]]:
    """Return the traces of a step, and of the same step computed again; only dense gradients are reduced."""
    state = create_parallel_state(ParallelSizes(ep=2))
    ddp = DistributedDataParallel(OneExpert(), DistributedDataParallelConfig(), state)

    def compute(records_all_norms: bool) -> list[RankTrace]:
        ddp.zero_grad_buffer(records_all_norms)
        ddp(state.rank + 1.0).backward()
        ddp.finish_grad_sync()
        return StepTrace().gather([ddp], state)

    with patch.object(param_and_grad_buffer, "_LARGEST_SMALL", 10):
        return compute(records_all_norms=False), compute(records_all_norms=True)


def test_a_step_with_unreduced_experts_equals_itself_computed_again() -> None:
    norm = 20**0.5
    for first, again in run_distributed(2, traces_with_experts):
        assert ranks_that_differ(first, again) == []
        # The gradient of the expert is divided by the number of ranks whose tokens it receives.
        assert [trace.gradient for trace in first] == pytest.approx([norm / 2, norm])
        assert [trace.large_gradient for trace in first] == [None, None]
        assert [trace.large_gradient for trace in again] == pytest.approx([norm, 2 * norm])


def test_parameters_unused_on_some_ranks_do_not_mix_collectives_up() -> None:
    results = run_distributed(2, reduce_with_parameters_unused_on_some_ranks)
    expected = autograd_gradients([0])
    expected["norm"] += 2 * ToyModel().norm.detach()
    expected["fc1_bias"] += 1.0
    for gradients in results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


SMALL = {"norm.weight", "fc1.bias"}


def recorded_norms(options: dict[str, object]) -> tuple[list[dict[str, float]], list[list[str]], dict[str, float]]:
    """Return the local norms of two steps, the names of bad gradients, and the norms of this rank's own gradients.

    Only the second step records the norms of large gradients. In later steps rank 1 has a NaN in a small gradient, and
    then in a large one.
    """
    state = create_parallel_state(ParallelSizes())
    model = ToyModel()
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**options), state)

    def step(spoiled: nn.Parameter | None = None, records_all_norms: bool = False) -> None:
        ddp.zero_grad_buffer(records_all_norms)
        ddp(*batch(state.rank)).backward()
        if spoiled is not None and state.rank == 1:
            main_grad_of(spoiled).tensor.view(-1)[1] = float("nan")
        ddp.finish_grad_sync()

    def norms() -> dict[str, float]:
        found = ddp.local_grad_norms()
        assert all(each.is_always_known == (each.name in SMALL) for each in found)
        return {each.name: each.norm for each in found}

    with patch.object(param_and_grad_buffer, "_LARGEST_SMALL", 10):
        step()
        found = [norms()]
        step(records_all_norms=True)
        found.append(norms())
        bad = []
        for spoiled in (model.norm, model.fc2):
            step(spoiled)
            bad.append(ddp.names_of_bad_local_gradients())
        step(model.fc2, records_all_norms=True)
        bad.append(ddp.names_of_bad_local_gradients())
    own = autograd_gradients([state.rank])
    return found, bad, {spec_of(each).name: own[name].norm().item() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"use_distributed_optimizer": True}, {"data_parallel_sharding_strategy": "optim_grads"}],
)
def test_only_norms_of_small_gradients_are_recorded_unless_a_step_is_computed_again(options: dict[str, object]) -> None:
    for rank, ((small, of_all), bad, own) in enumerate(run_distributed(2, recorded_norms, options)):
        assert small == pytest.approx({name: own[name] for name in SMALL}, rel=1e-12)
        assert of_all == pytest.approx(own, rel=1e-12)
        assert bad == ([["norm.weight"], [], ["fc2.weight"]] if rank == 1 else [[], [], []])


def check_after_change(rank_to_change: int) -> None:
    state = create_parallel_state()
    model = ToyModel(torch.bfloat16)
    check_replicas_equal(model.parameters(), state)
    if state.rank == rank_to_change:
        with torch.no_grad():
            model.fc1[2, 3] *= 1.01
            model.norm[0] = -model.norm[0]
    check_replicas_equal(model.parameters(), state)


@pytest.mark.parametrize("rank", [0, 2])
def test_replicas_that_drifted_apart_are_named(rank: int) -> None:
    with pytest.raises(
        RankFailure, match=r"2 of 6 parameters differ .*\[0, 1, 2\]: norm\.weight, fc1\.weight"
    ) as caught:
        run_distributed(3, check_after_change, rank)
    assert f"; rank {rank} differs from the others" in str(caught.value)
    assert isinstance(caught.value.__cause__, TrainingError)


def check_shards_after_change(rank_to_change: int) -> None:
    state = create_parallel_state(num_optimizer_instances=2)
    model = ToyModel(torch.bfloat16)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        num_distributed_optimizer_instances=2,
    )
    DistributedDataParallel(model, config, state)
    check_replicas_equal(model.parameters(), state)
    if state.rank == rank_to_change:
        held = next(values for parameter in model.parameters() for _, values in held_of(parameter))
        held.view(-1)[0] += 1.0
    check_replicas_equal(model.parameters(), state)


def test_copies_of_shards_that_drifted_apart_are_named() -> None:
    run_distributed(4, check_shards_after_change, -1)
    with pytest.raises(RankFailure, match=r"1 of \d+ shards of parameters differ .*\[1, 3\]: .*; there is no majority"):
        run_distributed(4, check_shards_after_change, 3)


def test_equal_replicas_pass() -> None:
    run_distributed(3, check_after_change, -1)


def backward_twice_without_no_sync() -> None:
    state = create_parallel_state()
    ddp = DistributedDataParallel(ToyModel(), DistributedDataParallelConfig(overlap_grad_reduce=True), state)
    ddp.zero_grad_buffer()
    for index in range(2):
        ddp(*batch(index)).backward()


def test_a_second_last_micro_batch_is_refused_while_overlapping() -> None:
    with pytest.raises(RankFailure, match=r"run all others under no_sync\(\)"):
        run_distributed(2, backward_twice_without_no_sync)


def linear(name: str, width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False, dtype=torch.float64)
    attach_spec(layer.weight, ParamSpec(f"{name}.weight", (width, width), full_shards((width, width))))
    return layer


def gathered(overlap: bool) -> tuple[list[list[bool]], list[list[bool]], list[float]]:
    """Return, when each layer is called, which buckets nobody has waited for; the same in a second pass; the sums."""
    state = create_parallel_state()
    layers = nn.Sequential(*(linear(name, 20) for name in ("first", "second", "third")))
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=overlap, ddp_bucket_size=1
    )
    ddp = DistributedDataParallel(layers, options, state)
    (buffer,) = ddp.grad_buffers
    flat = buffer.flat_parameters
    assert flat is not None
    with torch.no_grad():
        for part in ddp.shards:
            part.values.fill_(state.rank + 1.0)
    ddp.start_param_gather()
    seen: list[list[bool]] = []
    for layer in layers:
        layer.register_forward_hook(
            lambda *_: seen.append([flat.is_pending(i) for i in range(len(buffer.buckets))]),
        )
    layers(torch.ones(1, 20, dtype=torch.float64))
    first_pass = list(seen)
    seen.clear()
    layers(torch.ones(1, 20, dtype=torch.float64))
    return first_pass, seen, [float(p.sum()) for p in layers.parameters()]


def test_each_module_waits_for_its_own_parameters_only() -> None:
    for first_pass, second_pass, sums in run_distributed(2, gathered, True):
        # Buckets lie last layer first.
        assert first_pass == [[True, True, False], [True, False, False], [False, False, False]]
        assert second_pass == [[False] * 3] * 3
        # 400 weights in a bucket of 512: 256 of them are rank 0's.
        assert sums == [256 * 1.0 + 144 * 2.0] * 3


def test_without_overlap_nothing_is_on_its_way() -> None:
    for first_pass, _, sums in run_distributed(2, gathered, False):
        assert first_pass == [[False]] * 3
        # One bucket of 1,536: rank 0 has the last layer, and the second one from its beginning at 512 up to 768.
        assert sums == [400 * 2.0, 256 * 1.0 + 144 * 2.0, 400 * 1.0]


def full_size_buckets() -> int:
    """Return for how many buckets at once an overlapping backward pass of sharded gradients has memory."""
    layers = nn.Sequential(*(linear(name, 20) for name in ("first", "second", "third", "fourth")))
    options = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", ddp_bucket_size=1, overlap_grad_reduce=True
    )
    ddp = DistributedDataParallel(layers, options, create_parallel_state())
    ddp(torch.ones(3, 20, dtype=torch.float64)).sum().backward()
    ddp.finish_grad_sync()
    (buffer,) = ddp.grad_buffers
    assert isinstance(buffer, ShardedGradBuffer)
    return buffer.pool.num_allocated


def test_a_bucket_waits_for_a_reduction_under_way_once_two_have_memory() -> None:
    assert run_distributed(2, full_size_buckets) == [2, 2]
