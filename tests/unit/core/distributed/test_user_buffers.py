"""User buffers of NCCL: which tensors are allocated in a pool, and when the pool is registered and deregistered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core.distributed import distributed_data_parallel_config, param_and_grad_buffer, user_buffers
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import Group
from tests.unit.core.distributed.toy_model import ToyModel

Config = distributed_data_parallel_config.DistributedDataParallelConfig


class Backend:
    """Stand in for a communicator's NCCL backend, and record what happens to pools."""

    def __init__(self) -> None:
        self.mem_allocator = object()
        self.events: list[tuple[Any, ...]] = []

    def register_mem_pool(self, pool: Pool, symm: bool = False) -> None:
        self.events.append(("register", pool.number, symm))

    def deregister_mem_pool(self, pool: Pool) -> None:
        self.events.append(("deregister", pool.number))

    def _get_backend(self, device: torch.device) -> Backend:
        assert device.type == "cuda"
        return self


class Pool:
    """Stand in for torch.cuda.MemPool; ``tensors`` are those that torch.zeros returned while it was in use."""

    made: list[Pool]

    def __init__(self, allocator: object) -> None:
        self.allocator, self.number, self.tensors = allocator, len(Pool.made), set[int]()
        Pool.made.append(self)


class _Allocations(TorchFunctionMode):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.zeros:
            self.pool.tensors.add(result.data_ptr())
        return result


@contextlib.contextmanager
def use_mem_pool(pool: Pool, device: torch.device) -> Iterator[None]:
    with _Allocations(pool):
        yield


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Return the backend of the data-parallel group of a world of two ranks; CPU tensors count as CUDA's."""
    Pool.made = []
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "nccl")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    make = user_buffers.make_user_buffers
    monkeypatch.setattr(
        param_and_grad_buffer,
        "make_user_buffers",
        lambda group, device, *, is_symmetric: make(group, torch.device("cuda", 0), is_symmetric=is_symmetric),
    )
    yield Backend()
    user_buffers._deregister_all()


def wrap(backend: Any, **options: Any) -> DistributedDataParallel:
    state = describe_parallel_state(0, 2)
    group = replace(state.dp_cp, handle=backend)
    return DistributedDataParallel(ToyModel(), Config(**options), replace(state, dp_cp=group, expert_dp=group))


@pytest.mark.parametrize("options", [{}, {"disable_symmetric_registration": True}])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_gradients_and_gathered_parameters_are_in_one_registered_pool(
    backend: Backend, is_sharded: bool, options: dict[str, Any]
) -> None:
    ddp = wrap(backend, use_nccl_ub=True, use_distributed_optimizer=is_sharded, **options)
    (buffer,), (pool,) = ddp.grad_buffers, Pool.made
    expected = {buffer.grad_data.data_ptr()}
    if is_sharded:
        assert buffer.flat_parameters is not None
        expected.add(buffer.flat_parameters.data.data_ptr())
    assert pool.tensors == expected
    assert pool.allocator is backend.mem_allocator
    assert backend.events == [("register", 0, not options)]
    del ddp, buffer
    gc.collect()
    assert backend.events[1:] == [("deregister", 0)]


def test_pools_that_are_left_at_the_end_are_deregistered_once(backend: Backend) -> None:
    models = [wrap(backend, use_nccl_ub=True) for _ in range(2)]
    user_buffers._deregister_all()
    assert backend.events == [("register", 0, True), ("register", 1, True), ("deregister", 0), ("deregister", 1)]
    models.clear()
    gc.collect()
    assert len(backend.events) == 4


def test_without_the_flag_there_is_no_pool(backend: Backend) -> None:
    wrap(backend)
    assert (Pool.made, backend.events) == ([], [])


def test_groups_without_nccl_or_with_one_rank_have_no_user_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(("dp",), (0, 1), 0, handle=Backend())  # type: ignore[arg-type]
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "gloo")
    assert user_buffers.make_user_buffers(group, cuda, is_symmetric=True) is None
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "nccl")
    assert user_buffers.make_user_buffers(group, torch.device("cpu"), is_symmetric=True) is None
    assert user_buffers.make_user_buffers(replace(group, handle=None), cuda, is_symmetric=True) is None
