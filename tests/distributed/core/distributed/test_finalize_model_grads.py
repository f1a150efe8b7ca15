"""Partial gradients summed over the tensor-parallel ranks that hold copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import CollectiveCall, Group
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, even_shards, full_shards, tie_over_pipeline
from tests.harness.distributed import run_distributed


class Copies(nn.Module):
    """Hold a norm with partial gradients, one without, a key-value head shared by pairs, and a shard."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        sharers = 2
        group, member = divmod(tp.rank, sharers)
        self.partial_norm = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.whole_norm = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.key_value = nn.Parameter(torch.zeros(2, 7, dtype=torch.float64))
        self.half_norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.shard = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        copy = {"replicated_axes": ("tp",), "replica_index": tp.rank, "num_replicas": tp.size}
        summed = {"gradient_sum_axes": ("tp",)}
        rows = 2 * tp.size // sharers
        head = (Shard(Box((2 * group, 0), (2, 7)), (0, 0)),)
        attach_spec(self.partial_norm, ParamSpec("partial", (3,), full_shards((3,)), **copy, **summed))
        attach_spec(self.whole_norm, ParamSpec("whole", (5,), full_shards((5,)), **copy))
        attach_spec(
            self.key_value,
            ParamSpec("kv", (rows, 7), head, **summed, replica_index=member, num_replicas=sharers),
        )
        attach_spec(self.half_norm, ParamSpec("half", (4,), full_shards((4,)), **copy, **summed))
        shape = (3 * tp.size, 2)
        attach_spec(self.shard, ParamSpec("shard", shape, even_shards(shape, 0, tp.rank, tp.size)))


def finalized(tp_size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients after every rank brought ``rank + 1``, and how many collectives that took."""
    calls: list[CollectiveCall] = []
    state = create_parallel_state(ParallelSizes(tp=tp_size), observer=calls.append)
    model = Copies(state.tp)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    ddp.zero_grad_buffer()
    for parameter in model.parameters():
        main_grad_of(parameter).add(torch.full(parameter.shape, state.rank + 1.0))
    calls.clear()
    finalize_model_grads([ddp], state)
    return {name: main_grad_of(p).tensor for name, p in model.named_parameters()}, len(calls)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_copies_get_the_sum_of_their_parts_and_nothing_else_changes(tp_size: int) -> None:
    results = run_distributed(tp_size, finalized, tp_size)
    everyone = sum(range(1, tp_size + 1))
    for rank, (gradients, num_collectives) in enumerate(results):
        first_sharer = rank // 2 * 2
        sums = {
            "partial_norm": everyone,
            "half_norm": everyone,
            "key_value": 2 * first_sharer + 3,
            "whole_norm": rank + 1,
            "shard": rank + 1,
        }
        for name, value in sums.items():
            assert gradients[name].eq(value).all(), name
        # One for each gradient dtype: float64, and float32 for the bf16 parameter.
        assert num_collectives == 2


def test_with_replicas_the_mean_over_them_is_summed() -> None:
    results = run_distributed(4, finalized, 2)
    for rank, (gradients, _) in enumerate(results):
        # Tensor-parallel rank 0 is ranks 0 and 2, tensor-parallel rank 1 is ranks 1 and 3.
        assert gradients["partial_norm"].eq((1 + 3) / 2 + (2 + 4) / 2).all()
        assert gradients["shard"].eq((1 + 3) / 2 + rank % 2).all()


class End(nn.Module):
    """Hold this stage's copy of a tied table, between weights of other sizes on every stage."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(3 + 50 * stage, 7, dtype=torch.float64))
        attach_spec(self.before, ParamSpec(f"before{stage}", (3 + 50 * stage, 7), full_shards((3 + 50 * stage, 7))))
        self.table: nn.Parameter | None = None
        if stage in (0, num_stages - 1):
            self.table = nn.Parameter(torch.zeros(29, 11, dtype=torch.float64))
            spec = ParamSpec("weight", (29, 11), full_shards((29, 11)))
            attach_spec(self.table, tie_over_pipeline(spec, name="word.weight", is_first_stage=stage == 0))
        self.after = nn.Parameter(torch.zeros(13, 9 + stage, dtype=torch.float64))
        attach_spec(self.after, ParamSpec(f"after{stage}", (13, 9 + stage), full_shards((13, 9 + stage))))


def tied_sums(pp: int, strategy: str, per_token: bool) -> dict[str, list[torch.Tensor]]:
    """Return what this rank holds of each gradient after every rank brought ``1000 * (rank + 1) + place``."""
    state = create_parallel_state(ParallelSizes(pp=pp))
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    ddp = DistributedDataParallel(End(state.pp.rank, pp), config, state, calculate_per_token_loss=per_token)
    ddp.zero_grad_buffer()
    for parameter in ddp.parameters():
        places = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
        main_grad_of(parameter).add(places + 1000 * (state.rank + 1))
    finalize_model_grads([ddp], state, torch.tensor(5.0) if per_token else None)
    parts: dict[str, list[torch.Tensor]] = {}
    for part in ddp.shards:
        places = torch.arange(part.start, part.end, dtype=torch.float64)
        parts.setdefault(part.spec.name, []).append(torch.stack((places, part.gradient)))
    return parts


@pytest.mark.default(6)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize(("world_size", "pp", "per_token"), [(2, 2, False), (4, 2, True), (6, 3, False)])
def test_both_ends_get_the_sum_of_a_tied_weights_gradients(
    world_size: int, pp: int, per_token: bool, strategy: str
) -> None:
    results = run_distributed(world_size, tied_sums, pp, strategy, per_token)
    dp = world_size // pp
    divisor = 5.0 * dp if per_token else dp
    covered: dict[tuple[int, str], list[float]] = {}
    for rank, parts in enumerate(results):
        stage = rank // dp
        stages = {"word.weight": (0, pp - 1), f"before{stage}": (stage,), f"after{stage}": (stage,)}
        for name, held in parts.items():
            ranks = [dp * s + replica for s in stages[name] for replica in range(dp)]
            for places, gradient in (part.unbind() for part in held):
                expected = sum(places + 1000 * (r + 1) for r in ranks) / divisor
                torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=0.0)
                covered.setdefault((stage, name), []).extend(places.tolist())
    copies = dp if strategy == "no_shard" else 1
    for stage in (0, pp - 1):
        assert sorted(covered[stage, "word.weight"]) == sorted(list(range(29 * 11)) * copies)
