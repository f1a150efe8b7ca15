"""Process-wide groups over ranks: megatron-core's order of ranks, and what may be initialized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from tests.harness.distributed import run_distributed


def ranks_of(group: Any) -> list[int]:
    found: list[int] = dist.get_process_group_ranks(group)
    return found


def initialized(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranks of every group of the collection, the rank in it, and what a sum over it gives."""
    parallel_state.initialize_model_parallel(**sizes)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    found: dict[str, Any] = {}
    for name in ("tp", "pp", "mp", "cp", "tp_cp", "dp", "dp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp"):
        group = getattr(collection, name)
        value = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(value, group=group)
        found[name] = ranks_of(group)
        assert value.item() == sum(10.0**rank for rank in found[name]), name
        assert found[name][group.rank()] == dist.get_rank()
    found["embd"], found["pos_embd"] = (
        None if group is None else ranks_of(group) for group in (collection.embd, collection.pos_embd)
    )
    found["neighbors"] = (
        parallel_state.get_pipeline_model_parallel_prev_rank(),
        parallel_state.get_pipeline_model_parallel_next_rank(),
        parallel_state.get_pipeline_model_parallel_first_rank(),
        parallel_state.get_pipeline_model_parallel_last_rank(),
    )
    found["sources"] = (
        parallel_state.get_tensor_model_parallel_src_rank(),
        parallel_state.get_data_parallel_src_rank(),
        parallel_state.get_model_parallel_src_rank(),
    )
    found["stage"] = (
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
        parallel_state.is_rank_in_embedding_group(),
        parallel_state.is_rank_in_position_embedding_group(),
    )
    assert resolve_group(None, "dp").ranks == tuple(found["dp"])
    assert resolve_group(collection.pp) is resolve_group(collection.pp)
    parallel_state.destroy_model_parallel()
    assert parallel_state._PIPELINE_MODEL_PARALLEL_GROUP is None
    return found


@pytest.mark.default
def test_tensor_and_pipeline_groups() -> None:
    # Megatron-LM's example in its documentation: neighbors share a tensor-parallel group, stages are the slowest.
    results = run_distributed(8, initialized, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    assert results[5] == {
        "tp": [4, 5],
        "pp": [1, 5],
        "mp": [0, 1, 4, 5],
        "cp": [5],
        "tp_cp": [4, 5],
        "dp": [5, 7],
        "dp_cp": [5, 7],
        "ep": [5],
        "expt_tp": [4, 5],
        "tp_ep": [4, 5],
        "tp_ep_pp": [0, 1, 4, 5],
        "expt_dp": [5, 7],
        "embd": [1, 5],
        "pos_embd": None,
        "neighbors": (1, 1, 1, 5),
        "sources": (4, 5, 0),
        "stage": (False, True, True, False),
    }


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            {"cp": [4, 6], "dp": [0, 4], "dp_cp": [0, 2, 4, 6], "tp_cp": [4, 5, 6, 7]},
            id="context",
        ),
        pytest.param(
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
            {"ep": [4, 5, 6, 7], "expt_tp": [4], "tp_ep": [4, 5, 6, 7], "expt_dp": [0, 4], "dp": [0, 2, 4, 6]},
            id="experts",
        ),
        pytest.param(
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "order": "tp-pp-dp"},
            {"tp": [4, 5], "pp": [4, 6], "dp": [0, 4], "mp": [4, 5, 6, 7]},
            id="order",
        ),
        pytest.param({"pipeline_model_parallel_size": 8}, {"embd": None, "pp": list(range(8))}, id="stages"),
    ],
)
def test_groups_of_rank_4(sizes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = run_distributed(8, initialized, sizes)[4]
    assert {name: found[name] for name in expected} == expected


def special_groups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    parallel_state.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    found["levels"] = [ranks_of(group) for group in parallel_state.get_hierarchical_context_parallel_groups()]
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(hybrid_context_parallel=True, create_all_gather_group=True)
    found["hybrid"] = [
        ranks_of(parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)) for size in (2, 4)
    ]
    both = [
        parallel_state.get_data_parallel_group(with_context_parallel=True, independent_all_gather=separate)
        for separate in (False, True)
    ]
    found["separate"] = both[0] is not both[1] and ranks_of(both[0]) == ranks_of(both[1])
    assert parallel_state.has_separate_all_gather_group()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.has_separate_all_gather_group()

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        get_embedding_ranks=lambda ranks: list(ranks[:1]),
        num_distributed_optimizer_instances=2,
    )
    found["virtual"] = (
        parallel_state.get_virtual_pipeline_model_parallel_rank(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    found["embedding"] = parallel_state.is_rank_in_embedding_group()
    found["instances"] = [
        ranks_of(group)
        for group in (
            parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            parallel_state.get_inter_distributed_optimizer_instance_group(),
            parallel_state.get_intra_distributed_optimizer_instance_group(),
            parallel_state.get_data_parallel_group_gloo(),
        )
    ]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with pytest.raises(AssertionError):
        parallel_state.get_data_parallel_group_gloo()
    parallel_state.destroy_model_parallel()
    return found


def test_levels_hybrid_groups_and_optimizer_instances() -> None:
    found = run_distributed(4, special_groups)[2]
    assert found == {
        "levels": [[2, 3], [0, 2]],
        "hybrid": [[2, 3], [0, 1, 2, 3]],
        "separate": True,
        "virtual": (0, 2),
        "embedding": False,
        "instances": [[2], [2, 3], [0, 2], [2, 3]],
    }


def rejections() -> list[str]:
    """Return the message of each call that must fail, after which a correct call works."""
    failures = []
    for sizes in (
        {"tensor_model_parallel_size": 4},
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"expert_model_parallel_size": 4},
        {"virtual_pipeline_model_parallel_size": 2},
        {"use_sharp": True},
        {"nccl_communicator_config_path": "nccl.yaml"},
        {"high_priority_stream_groups": ["dp"], "pipeline_model_parallel_comm_backend": "ucc"},
    ):
        with pytest.raises(RuntimeError) as caught:
            parallel_state.initialize_model_parallel(**sizes)
        failures.append(str(caught.value))
        assert not parallel_state.is_initialized()
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(AssertionError, match="call destroy_model_parallel first"):
        parallel_state.initialize_model_parallel(2)
    first = parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    assert parallel_state.get_tensor_model_parallel_group() is first
    parallel_state.destroy_model_parallel()
    return failures


def test_what_cannot_be_initialized_is_said_in_one_line() -> None:
    for messages in run_distributed(2, rejections):
        assert messages == [
            "world_size (2) is not divisible by tensor(4) x pipeline(1) x context(1) = 4",
            "world_size (2) is not divisible by tensor(2) x pipeline(2) x context(1) = 4",
            "world_size (2) is not divisible by expert-tensor(1) x expert(4) x pipeline(1) = 4",
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule",
            "initialize_model_parallel does not support use_sharp=True; leave it at its default",
            "initialize_model_parallel does not support nccl_communicator_config_path='nccl.yaml'; leave it at its "
            "default",
            "initialize_model_parallel does not support pipeline_model_parallel_comm_backend='ucc', "
            "high_priority_stream_groups=['dp']; leave it at its default",
        ]
