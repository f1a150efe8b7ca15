"""Main gradients of one replica: accumulation, reuse of memory, types, and over how many ranks what is sharded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_layout import plan_buckets
from megatron.core.distributed.weight_checks import bit_hash
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.core.distributed.toy_model import ToyModel, autograd_gradients, batch

STATE = describe_parallel_state(0, 1)


def wrap(model: nn.Module, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(model, DistributedDataParallelConfig(**options), STATE)  # type: ignore[arg-type]


def run_iteration(ddp: DistributedDataParallel, batches: list[int], divisor: float = 1.0) -> None:
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        for index in batches[:-1]:
            (ddp(*batch(index)) / divisor).backward()
    (ddp(*batch(batches[-1])) / divisor).backward()


def gradients(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    result = {}
    for name, parameter in ddp.module.named_parameters():
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        result[name] = main_grad.tensor
    return result


@pytest.mark.parametrize("overlap", [False, True])
def test_micro_batches_add_up_to_autograds_gradient_in_every_iteration(overlap: bool) -> None:
    ddp = wrap(ToyModel(), overlap_grad_reduce=overlap, ddp_bucket_size=70)
    for batches in ([0, 1, 2], [3], [4, 5]):
        run_iteration(ddp, batches, divisor=3.0)
        ddp.finish_grad_sync()
        expected = autograd_gradients(batches, divisor=3.0)
        assert expected["unused"].eq(0).all()
        for name, grad in gradients(ddp).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)
        assert all(parameter.grad is None for parameter in ddp.parameters())


def test_a_model_that_holds_autograd_nodes_is_freed() -> None:
    """Captured layers hold such nodes: on an H200 the memory of a training run with CUDA graphs was never freed."""
    model = ToyModel()
    model.captured = model(*batch(0))
    ddp, freed = wrap(model), []
    for parameter in model.parameters():
        weakref.finalize(parameter, freed.append, True)
    count = len(list(model.parameters()))
    run_iteration(ddp, [0])
    del model, ddp, parameter
    gc.collect()
    assert len(freed) == count


def test_stale_values_of_an_unused_parameter_are_overwritten() -> None:
    ddp = wrap(ToyModel())
    gradients(ddp)["unused"].fill_(5.0)
    run_iteration(ddp, [0])
    ddp.finish_grad_sync()
    assert gradients(ddp)["unused"].eq(0).all()


def test_gradients_are_views_of_one_flat_buffer_in_reverse_order() -> None:
    ddp = wrap(ToyModel())
    (buffer,) = ddp.grad_buffers
    begin = buffer.grad_data.data_ptr()
    offsets = {name: (g.data_ptr() - begin) // 8 for name, g in gradients(ddp).items()}
    assert sorted(offsets, key=offsets.__getitem__) == list(reversed(offsets))
    assert len(buffer.buckets) == 1


@pytest.mark.parametrize(
    ("param_dtype", "in_bf16", "grad_dtype"),
    [
        (torch.bfloat16, False, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, False, torch.float32),
        (torch.float32, True, torch.float32),
        (torch.float64, False, torch.float64),
    ],
)
def test_main_gradients_are_kept_in_the_arithmetic_dtype(
    param_dtype: torch.dtype, in_bf16: bool, grad_dtype: torch.dtype
) -> None:
    ddp = wrap(ToyModel(param_dtype), grad_reduce_in_bf16=in_bf16)
    run_iteration(ddp, [0, 1])
    expected = autograd_gradients([0, 1])
    for name, grad in gradients(ddp).items():
        assert grad.dtype == grad_dtype
        scale = expected[name].abs().max()
        if name != "unused":
            assert (grad - expected[name]).abs().max() < 0.1 * scale


def test_parameters_of_several_dtypes_have_a_buffer_each() -> None:
    model = ToyModel(torch.bfloat16)
    model.norm.data = model.norm.data.float()
    ddp = wrap(model, grad_reduce_in_bf16=True)
    assert [buffer.grad_data.dtype for buffer in ddp.grad_buffers] == [torch.bfloat16, torch.float32]


def test_frozen_parameters_have_no_main_gradient() -> None:
    model = ToyModel()
    model.norm.requires_grad_(False)
    wrap(model)
    assert main_grad_of(model.norm) is None


def test_one_replica_needs_no_no_sync() -> None:
    ddp = wrap(ToyModel(), overlap_grad_reduce=True)
    ddp.zero_grad_buffer()
    ddp(*batch(0)).backward()
    ddp(*batch(1)).backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(gradients(ddp)["fc1"], autograd_gradients([0, 1])["fc1"])


def test_no_sync_ends_with_an_exception() -> None:
    ddp = wrap(ToyModel())

    def fail_inside() -> None:
        with ddp.no_sync():
            assert not ddp.is_last_microbatch
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert ddp.is_last_microbatch


def test_per_token_loss_divides_by_the_tokens_of_the_iteration() -> None:
    ddp = DistributedDataParallel(ToyModel(), DistributedDataParallelConfig(), STATE, calculate_per_token_loss=True)
    run_iteration(ddp, [0, 1])
    finalize_model_grads([ddp], STATE, torch.tensor(14))
    expected = autograd_gradients([0, 1], divisor=14.0)
    for name, grad in gradients(ddp).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)


def test_a_batch_without_tokens_leaves_zeros() -> None:
    ddp = wrap(ToyModel())
    ddp.zero_grad_buffer()
    finalize_model_grads([ddp], STATE, torch.tensor(0.0))
    assert all(grad.eq(0).all() for grad in gradients(ddp).values())


def test_bad_gradients_are_named() -> None:
    ddp = wrap(ToyModel())
    run_iteration(ddp, [0])
    ddp.finish_grad_sync()
    assert ddp.names_of_bad_local_gradients() == []
    gradients(ddp)["fc1_bias"][3] = float("inf")
    gradients(ddp)["embedding"][1, 2] = float("nan")
    assert ddp.names_of_bad_local_gradients() == ["fc1.bias", "embedding.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bit_hash_sees_a_changed_bit_and_an_exchange_of_values(dtype: torch.dtype) -> None:
    values = torch.arange(1, 40, dtype=torch.float64).to(dtype).view(3, 13)
    assert bit_hash(values) == bit_hash(values.clone())
    negative_zero, exchanged = torch.zeros(5, dtype=dtype), values.clone()
    negative_zero[2] = -0.0
    exchanged[0, 0], exchanged[2, 4] = values[2, 4], values[0, 0]
    assert bit_hash(negative_zero) != bit_hash(torch.zeros(5, dtype=dtype))
    assert bit_hash(exchanged) != bit_hash(values)


@pytest.mark.parametrize(
    ("backend", "in_collective", "expected"),
    [
        ("gloo", False, ("sum", 0.5)),
        # NVLS offers no average, so NCCL is asked for a sum too.
        ("nccl", False, ("sum", 0.5)),
        ("nccl", True, ("avg", 1.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_flag_leaves_the_average_to_the_collective(
    monkeypatch: pytest.MonkeyPatch, backend: str, in_collective: bool, expected: tuple[str, float], dtype: torch.dtype
) -> None:
    sent: list[tuple[str, float]] = []

    def all_reduce(tensor: torch.Tensor, group: object, op: str, async_op: bool) -> None:
        sent.append((op, tensor.max().item()))

    monkeypatch.setattr("megatron.core.distributed.param_and_grad_buffer.all_reduce", all_reduce)
    monkeypatch.setattr("torch.distributed.get_backend", lambda handle: backend)
    config = DistributedDataParallelConfig(
        grad_reduce_in_bf16=dtype is torch.bfloat16, ddp_average_in_collective=in_collective
    )
    model = ToyModel(dtype)
    ddp = DistributedDataParallel(model, config, describe_parallel_state(0, 2))
    ddp.zero_grad_buffer()
    main_grad = main_grad_of(model.fc1)
    assert main_grad is not None
    main_grad.add(torch.ones_like(model.fc1))
    ddp.finish_grad_sync()
    assert sent == [expected]


def test_frozen_parameters_without_memory_are_given_it() -> None:
    model = ToyModel()
    model.unused.requires_grad = False
    model.unused.untyped_storage().resize_(0)
    wrap(model)
    assert model.unused.untyped_storage().nbytes() == model.unused.nbytes
    assert main_grad_of(model.unused) is None


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
