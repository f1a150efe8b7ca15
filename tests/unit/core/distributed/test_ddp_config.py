"""Over how many ranks what is sharded, and in which types gradients are kept."""

from __future__ import annotations

import pytest

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_layout import plan_buckets


@pytest.mark.parametrize(
    ("strategy", "has_flag", "sharded"),
    [
        ("no_shard", False, (False, False, False)),
        ("no_shard", True, (True, False, False)),
        ("optim", False, (True, False, False)),
        ("optim_grads", False, (True, True, False)),
        ("optim_grads_params", False, (True, True, True)),
    ],
)
def test_strategies(strategy: str, has_flag: bool, sharded: tuple[bool, bool, bool]) -> None:
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, use_distributed_optimizer=has_flag)
    assert (config.shards_optimizer, config.shards_gradients, config.shards_weights) == sharded
    assert [config.shards_over(count) for count in (1, 2)] == [False, sharded[0]]


def test_instances_hold_copies_of_each_others_shards() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    assert [config.num_shards(count) for count in (1, 2, 4, 6)] == [1, 1, 2, 3]
    assert [config.shards_over(count) for count in (2, 4)] == [False, True]


@pytest.mark.parametrize(
    ("in_bf16", "params_dtype", "expected"),
    [
        (True, "bfloat16", "bfloat16"),
        (True, "float32", "float32"),
        (False, "bfloat16", "float32"),
        (False, "float64", "float64"),
    ],
)
def test_gradients_are_kept_in_float32_at_least_unless_asked_otherwise(
    in_bf16: bool, params_dtype: str, expected: str
) -> None:
    assert DistributedDataParallelConfig(grad_reduce_in_bf16=in_bf16).grad_dtype(params_dtype) == expected


@pytest.mark.parametrize(
    ("fields", "num_replicas", "num_buckets"),
    [
        ({}, 2, 1),
        ({"overlap_grad_reduce": True}, 2, 4),
        ({"data_parallel_sharding_strategy": "optim"}, 2, 2),
        ({"data_parallel_sharding_strategy": "optim", "overlap_param_gather": True}, 2, 4),
        ({"data_parallel_sharding_strategy": "optim_grads"}, 2, 4),
        ({"data_parallel_sharding_strategy": "optim_grads"}, 1, 1),
        # By unit: the first two parameters, and the others, of which the tied one is alone.
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, 2, 3),
    ],
)
def test_buckets_are_small_where_they_are_reduced_or_gathered_one_by_one(
    fields: dict[str, object], num_replicas: int, num_buckets: int
) -> None:
    config = DistributedDataParallelConfig(ddp_bucket_size=1, **fields)  # type: ignore[arg-type]
    layout = plan_buckets([200, 200, 200, 200], [3], config, num_replicas, [0, 0, 1, 1])
    assert len(layout.buckets) == num_buckets
