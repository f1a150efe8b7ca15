"""Rules of NCCL that collectives through shared memory do not need: in place, after aborts, and for user buffers."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

_WHOLE_OUTPUT, _WHOLE_INPUT = "output", "input"
_COLLECTIVES = {
    "all_gather_into_tensor": _WHOLE_OUTPUT,
    "all_gather_single": _WHOLE_OUTPUT,
    "reduce_scatter_tensor": _WHOLE_INPUT,
    "reduce_scatter_single": _WHOLE_INPUT,
    "all_to_all_single": "",
}
"""The functions of torch.distributed, and which of their tensors has the parts of all ranks."""
_NCCL_MEMORY = object()
"""The allocator that calls ``ncclMemAlloc``."""
_ENDS_PROCESS = ("1", "3")
"""Values of `TORCH_NCCL_ASYNC_ERROR_HANDLING` with which the watchdog ends the process after an abort."""


def check_in_place(distributed: Any) -> None:
    """Let collectives of emulated devices fail whose input and output overlap and are not in place.

    The rule is that of NCCL's documentation, "In-place Operations": the part of a rank lies in the whole at the number
    of the rank. An all-to-all, which torch makes of sends and receives, has no in-place form.
    """
    for name, whole in _COLLECTIVES.items():
        if hasattr(distributed, name):
            setattr(distributed, name, _checked(distributed, getattr(distributed, name), name, whole))


def check_error_handling(distributed: Any) -> None:
    """End a process that makes groups after an abort for which torch's watchdog would have ended it.

    A group reads `TORCH_NCCL_ASYNC_ERROR_HANDLING` when it is made (the constructor of `ProcessGroupNCCL`). With 1,
    which torchrun sets, and with 3, the default, the watchdog raises the error of an aborted call on its thread, which
    ends the process (`ProcessGroupNCCL::WorkNCCL::handleException`).
    """
    made_with, aborted_with = list[str](), list[str]()
    init, abort = distributed.init_process_group, distributed._abort_process_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        ending = [value for value in aborted_with if value in _ENDS_PROCESS]
        if ending:
            print(
                "emulated CUDA: torch's watchdog has ended this process, since its communicators were aborted and had "
                f"been made with TORCH_NCCL_ASYNC_ERROR_HANDLING={ending[0]}: with 0 or 2 the process continues",
                file=sys.stderr,
                flush=True,
            )
            os.abort()
        made_with.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        return init(*arguments, **named)

    @functools.wraps(abort)
    def abort_process_group(*arguments: Any, **named: Any) -> Any:
        aborted_with.extend(made_with)
        made_with.clear()
        return abort(*arguments, **named)

    distributed.init_process_group, distributed._abort_process_group = init_process_group, abort_process_group


def add_user_buffers(process_group: Any) -> None:
    """Add to ``ProcessGroupNCCL`` NCCL's allocator, and the registration of pools of its memory.

    As in torch, a pool can be registered once, and only registered ones can be deregistered. NCCL takes symmetric
    memory and multicast objects only from its own allocator (``ncclMemAlloc``).
    """
    registered = dict[int, set[tuple[int, int]]]()

    def register(self: Any, pool: Any, symm: bool = False) -> None:
        pools = registered.setdefault(id(self), set())
        if pool.allocator is not _NCCL_MEMORY:
            raise RuntimeError("emulated CUDA: the memory of this pool is not from ncclMemAlloc")
        if pool.id in pools:
            raise RuntimeError("emulated CUDA: this pool is already registered with the communicator")
        pools.add(pool.id)

    def deregister(self: Any, pool: Any) -> None:
        if pool.id not in registered.get(id(self), ()):
            raise RuntimeError("emulated CUDA: this pool is not registered with the communicator")
        registered[id(self)].remove(pool.id)

    process_group.mem_allocator = property(lambda self: _NCCL_MEMORY)
    process_group.register_mem_pool, process_group.deregister_mem_pool = register, deregister


def _checked(distributed: Any, collective: Callable[..., Any], name: str, whole: str) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(output: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if output.is_cuda and tensor.is_cuda and _overlap(output, tensor):
            group = inspect.signature(collective).bind(output, tensor, *arguments, **named).arguments.get("group")
            rank = distributed.get_rank(group)
            part, parts = (tensor, output) if whole == _WHOLE_OUTPUT else (output, tensor)
            if not whole or part.data_ptr() != parts.data_ptr() + rank * part.nbytes:
                raise RuntimeError(
                    f"emulated CUDA: race: the input and the output of {name} overlap, and NCCL reads one while it "
                    f"writes the other: this is not the place of rank {rank}"
                )
        return collective(output, tensor, *arguments, **named)

    return call


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share bytes."""
    first, second = left.data_ptr(), right.data_ptr()
    return bool(left.nbytes and right.nbytes) and first < second + right.nbytes and second < first + left.nbytes
