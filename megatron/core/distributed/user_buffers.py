"""User buffers of NCCL: memory that NCCL allocates and that is registered with the communicator of a group.

NCCL can then reduce with NVLS in the NVLink switch, and copies no data into buffers of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.process_group import Group

_REGISTERED: list[weakref.finalize[Any, Any]] = []
"""Deregistrations at the end of the process, which must precede that of the communicators."""


class UserBuffers:
    """Memory pool of one group's buffers, registered with the group's communicator until this object is freed.

    With ``is_symmetric`` all ranks of the group map the memory at the same addresses, and must allocate the same sizes
    in the same order.
    """

    def __init__(self, group: Group, device: torch.device, *, is_symmetric: bool) -> None:
        assert group.handle is not None, "a group of one rank communicates nothing"
        self._backend: Any = group.handle._get_backend(device)
        self._device = device
        self._is_symmetric = is_symmetric
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate CUDA memory from the pool inside the context, and register it at the end; use it once."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield
        self._backend.register_mem_pool(self._pool, self._is_symmetric)
        deregistration = weakref.finalize(self, _deregister, self._backend, self._pool)
        deregistration.atexit = False
        if not _REGISTERED:
            # The communicators were created earlier, so their destruction is registered earlier and runs later.
            atexit.register(_deregister_all)
        _REGISTERED[:] = [other for other in _REGISTERED if other.alive] + [deregistration]


def make_user_buffers(group: Group, device: torch.device, *, is_symmetric: bool) -> UserBuffers | None:
    """Return user buffers for a group, or None if it has one rank or does not use NCCL on CUDA."""
    if group.handle is None or device.type != "cuda" or "nccl" not in dist.get_backend(group.handle):
        return None
    return UserBuffers(group, device, is_symmetric=is_symmetric)


def _deregister(backend: Any, pool: Any) -> None:
    if dist.is_initialized():
        backend.deregister_mem_pool(pool)


def _deregister_all() -> None:
    for deregistration in _REGISTERED:
        deregistration()
    _REGISTERED.clear()
