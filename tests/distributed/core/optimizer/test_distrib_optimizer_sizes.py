"""What the distributed optimizer holds and sends: the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_layout import PARAM_ALIGNMENT
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import CollectiveCall
from megatron.core.sharding import held_of
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    NUM_MICROBATCHES,
    OPTIM,
    OVERLAP,
    Options,
    Wide,
    build,
)
from tests.harness.distributed import run_distributed


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
