"""Data parallelism: gradient buffers, buckets, sharding, and the last gradient reductions of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.flat_parameters import (
        ParamShard,
        is_sent_in_float8,
        num_float8_scales,
        send_in_float8,
    )
    from megatron.core.distributed.fully_sharded_data_parallel import unit_labels
    from megatron.core.distributed.param_and_grad_buffer import BucketShard, GatherHook, ParamAndGradBuffer
    from megatron.core.distributed.param_layout import (
        MIN_POOL_SIZE,
        PARAM_ALIGNMENT,
        ParamLayout,
        plan_buckets,
        ranges_within,
        round_up,
    )
    from megatron.core.distributed.weight_checks import (
        ABSURD_RATIO,
        OUTLIER_RATIO,
        BadWeightsError,
        check_replicas_equal,
        compare_over_replicas,
        describe_bad_weights,
        differing_replicas,
        find_bad_weights,
        find_huge_weights,
        find_outlying_weights,
        gather_bad_weights,
        not_finite,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "distributed_data_parallel": "DistributedDataParallel",
        "distributed_data_parallel_config": "DistributedDataParallelConfig",
        "flat_parameters": "ParamShard is_sent_in_float8 num_float8_scales send_in_float8",
        "fully_sharded_data_parallel": "unit_labels",
        "param_and_grad_buffer": "BucketShard GatherHook ParamAndGradBuffer",
        "param_layout": "MIN_POOL_SIZE PARAM_ALIGNMENT ParamLayout ranges_within plan_buckets round_up",
        "weight_checks": (
            "ABSURD_RATIO BadWeightsError OUTLIER_RATIO check_replicas_equal compare_over_replicas "
            "describe_bad_weights differing_replicas find_bad_weights find_huge_weights find_outlying_weights "
            "gather_bad_weights not_finite"
        ),
    },
)
