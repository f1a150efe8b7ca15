"""A CUDA device without a driver: what the rest of the project asks of a device, answered from a GPU type's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron.core.available_host_memory import HostRoom
from megatron.core.cuda_graph import GraphBackend
from megatron.core.device import Device, MemoryUse
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import DeviceMark
from megatron.core.host_memory import HostCopies
from megatron.planner.gpu import Gpu

_GENERATOR_STATE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class PretendedDevice(Device):
    """Stand in for a CUDA device; ``on_wait`` is told where the host would wait for it, ``copies`` of what moves."""

    gpu: Gpu
    on_wait: Callable[[str], None]
    copies: HostCopies
    count_live_bytes: Callable[[], int]

    def make_current(self) -> None:
        """Do nothing: there is no other device."""

    def synchronize(self) -> None:
        """Note a wait."""
        self.on_wait("synchronize")

    def seed_default_generator(self, seed: int) -> None:
        """Do nothing: no numbers are drawn."""

    def get_rng_state(self) -> torch.Tensor:
        """Return bytes of the size of a CUDA generator's state, which say nothing."""
        return torch.zeros(_GENERATOR_STATE_BYTES, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Do nothing: no numbers are drawn."""

    def empty_host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the machine, not pinned: nothing is fetched from it."""
        with unset_fake_temporarily():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def host_copies(self) -> HostCopies:
        """Return what notes copies."""
        return self.copies

    def free_bytes(self) -> int | None:
        """Return what live tensors leave of the GPU type's memory."""
        return self.gpu.memory_bytes - self.count_live_bytes()

    def host_room(self) -> HostRoom | None:
        """Return nothing: the machine that is pretended has whatever it needs."""
        return None

    def graph_backend(self) -> GraphBackend | None:
        """Refuse: there is no driver that records.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("--cuda-graph-impl local has no dry run: leave it out, its kernels are the same")

    def marker(self) -> Callable[[DeviceMark | None], DeviceMark | None] | None:
        """Return nothing: what is communicated is over at once."""
        return None

    def memory_use(self) -> MemoryUse:
        """Return zeros: the memory of the step is in its record."""
        return MemoryUse(0.0, 0.0, 0.0, 0.0)

    def peak_tflops(self, dtype_name: str) -> float | None:
        """Return the dense peak of the GPU type."""
        return (self.gpu.half_flops if dtype_name in ("bfloat16", "float16") else self.gpu.single_flops) / 1e12

    def empty_cache(self) -> None:
        """Do nothing: there is no allocator."""
