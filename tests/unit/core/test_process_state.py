"""Process-wide groups without torch.distributed: rank enumeration, overridden sizes, and what is missing before."""

from __future__ import annotations

import itertools

import pytest
import torch

import megatron.core
from megatron import mpu
from megatron.core import parallel_state, process_state
from megatron.core.process_group import single_rank_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import RankGenerator, process_object, resolve_group

SIZES = {"tp": 2, "cp": 2, "dp": 3, "pp": 2, "ep": 1}


@pytest.fixture(autouse=True)
def _forget_overrides():
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-pp-dp-cp", "pp-dp-tp-cp"])
@pytest.mark.parametrize("token", ["tp", "dp", "tp-dp", "dp-cp", "tp-pp", "tp-cp-dp"])
def test_groups_are_the_ranks_that_differ_along_their_axes_only(order: str, token: str) -> None:
    axes = [axis for axis in order.split("-") if axis != "ep"]
    places = {
        rank: dict(zip(reversed(axes), reversed(place)))
        for rank, place in enumerate(
            tuple(reversed(each)) for each in itertools.product(*(range(SIZES[axis]) for axis in reversed(axes)))
        )
    }
    spanned = token.split("-")
    expected: dict[tuple[int, ...], list[int]] = {}
    for rank, place in places.items():
        fixed = tuple(value for axis, value in sorted(place.items()) if axis not in spanned)
        expected.setdefault(fixed, []).append(rank)
    groups = RankGenerator(**SIZES, order=order).get_ranks(token)
    assert groups == sorted(expected.values())


def test_ranks_of_experts_alternate_with_the_offset() -> None:
    generator = RankGenerator(tp=1, ep=2, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp", rank_offset=8)
    assert generator.get_ranks("ep") == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert generator.get_ranks("dp") == [[8, 10], [9, 11], [12, 14], [13, 15]]
    assert generator.world_size == 8
    assert generator.get_mask("tp-dp-pp", "tp-pp") == [True, False, True]


def test_groups_of_a_mask_span_the_axes_that_it_selects() -> None:
    groups = parallel_state.generate_masked_orthogonal_rank_groups
    assert groups(12, [2, 3, 2], [False, True, False]) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert groups(4, [2, 2], [True, True]) == [[0, 1, 2, 3]]
    with pytest.raises(AssertionError, match="is not the world size 6"):
        groups(6, [2, 2], [True, False])


def test_an_order_without_a_used_axis_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="does not contain cp, whose size is 2"):
        RankGenerator(tp=2, ep=1, dp=1, pp=1, cp=2, order="tp-dp-pp")
    with pytest.raises(RuntimeError, match="unknown axes"):
        RankGenerator(tp=2, ep=1, dp=1, pp=1, cp=1, order="tp-dpp")
    with pytest.raises(AssertionError, match="separate grid"):
        RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    # An axis of one rank may be missing, in any case.
    assert RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="TP-DP").order.startswith("tp-dp-")


def test_nothing_is_initialized_without_processes() -> None:
    assert not parallel_state.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(AssertionError, match="tensor model parallel group is not initialized"):
        parallel_state.get_tensor_model_parallel_group()
    with pytest.raises(AssertionError, match=r"torch\.distributed is not initialized"):
        parallel_state.initialize_model_parallel()
    assert parallel_state.get_data_parallel_world_size() == parallel_state.get_context_parallel_rank() == 0
    with pytest.raises(AttributeError, match="_NO_SUCH_GROUP"):
        _ = parallel_state._NO_SUCH_GROUP


def test_sizes_and_ranks_that_are_set_are_returned() -> None:
    parallel_state.set_tensor_model_parallel_world_size(4)
    parallel_state.set_tensor_model_parallel_rank(3)
    parallel_state.set_pipeline_model_parallel_world_size(2)
    parallel_state.set_pipeline_model_parallel_rank(1)
    parallel_state.set_expert_model_parallel_rank(5)
    assert parallel_state.get_tensor_model_parallel_world_size() == 4
    # Experts without their own size are sharded like the other layers.
    assert parallel_state.get_expert_tensor_parallel_world_size() == 4
    assert parallel_state.get_expert_tensor_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 3
    assert parallel_state.is_pipeline_last_stage()
    assert not parallel_state.is_pipeline_first_stage()
    assert parallel_state.get_all_ranks() == "3_0_0_1_5"
    parallel_state.destroy_model_parallel()
    with pytest.raises(AssertionError):
        parallel_state.get_tensor_model_parallel_world_size()


def test_virtual_stages_need_their_number() -> None:
    parallel_state.set_pipeline_model_parallel_world_size(2)
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(3)
    assert parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=0)
    assert not parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=2)
    assert parallel_state.is_pipeline_first_stage()
    with pytest.raises(AssertionError, match="vp_stage"):
        parallel_state.is_pipeline_first_stage(ignore_virtual=False)
    parallel_state.set_pipeline_model_parallel_rank(1)
    assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2)
    assert not parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
    with pytest.warns(DeprecationWarning, match="vp_stage"):
        parallel_state.set_virtual_pipeline_model_parallel_rank(1)
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1


def test_a_group_that_is_passed_is_used_and_one_process_has_its_own() -> None:
    own = single_rank_group(("dp",))
    assert resolve_group(own) is own
    assert (resolve_group(None).size, resolve_group(None, "cp").name) == (1, "cp")


def test_an_object_of_the_process_is_made_once_and_outlives_the_groups() -> None:
    made = process_object("a test's object", list)
    parallel_state.destroy_model_parallel()
    assert process_object("a test's object", list) is made
    process_state.forget_process_object("a test's object")
    assert process_object("a test's object", list) is not made
    process_state.forget_process_object("a test's object")


def test_memory_of_a_name_is_reused_until_more_is_needed() -> None:
    buffer = parallel_state.get_global_memory_buffer()
    first = buffer.get_tensor((2, 3), torch.float32, "mpu")
    assert first.shape == (2, 3)
    assert buffer.get_tensor((4,), torch.float32, "mpu").data_ptr() == first.data_ptr()
    assert buffer.get_tensor((4,), torch.float64, "mpu").dtype is torch.float64
    assert buffer.get_tensor((3, 3), torch.float32, "mpu").numel() == 9
    parallel_state.destroy_model_parallel()
    assert parallel_state.get_global_memory_buffer() is not buffer


def test_a_collection_has_the_groups_that_are_passed() -> None:
    collection = ProcessGroupCollection()
    assert repr(collection) == "ProcessGroupCollection(empty)"
    collection.hcp = []
    assert repr(collection) == "ProcessGroupCollection(hcp(0))"
    assert not hasattr(collection, "tp")
    with pytest.raises(ValueError, match="Unknown attribute: tensor"):
        ProcessGroupCollection(tensor=None)
    with pytest.raises(ValueError, match="Invalid process groups requested"):
        ProcessGroupCollection.use_mpu_process_groups(["tensor"])
    assert ProcessGroupCollection.use_mpu_process_groups(["tp", "embd"]).tp is None


def test_old_and_top_level_names_are_those_of_the_modules() -> None:
    assert megatron.core.mpu is megatron.core.parallel_state is parallel_state
    assert megatron.core.ModelParallelConfig().params_dtype is torch.float32
    assert mpu.get_data_parallel_rank is process_state.get_data_parallel_rank
    assert mpu.ColumnParallelLinear is megatron.core.tensor_parallel.ColumnParallelLinear
    for module in (megatron.core, mpu):
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name
