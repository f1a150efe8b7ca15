"""How long messages take between the ranks of each axis: NVLink within a machine, one network port a GPU between."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.parallel_sizes import ParallelSizes
from megatron.planner.gpu import Gpu

GPUS_A_MACHINE = 8
_LINK_SHARE = 0.8
"""Part of a link's bandwidth that NCCL reaches with large messages."""
_LATENCY_S = 15e-6


@dataclass(frozen=True)
class Links:
    """Hold what joins the ranks of a grid: neighbours are of one tensor-parallel group, then cp, dp, pp."""

    gpu: Gpu
    sizes: ParallelSizes

    def tensor_parallel_seconds(self, num_bytes: float) -> float:
        """Return the time of gathering or scattering so many bytes over the tensor-parallel ranks."""
        t = self.sizes.tp
        return self._seconds(num_bytes * (t - 1) / t, t, 1) if t > 1 else 0.0

    def context_seconds(self, operation: str, num_bytes: float) -> float:
        """Return the time of one message between the context-parallel ranks: to a neighbour, or over all of them."""
        c = self.sizes.cp
        if c == 1:
            return 0.0
        share = 1.0 if operation == "send" else (c - 1) / c
        return self._seconds(num_bytes * share, c, self.sizes.tp)

    def replica_seconds(self, num_bytes: float, copies: int = 1) -> float:
        """Return the time of gathering or scattering so many bytes over the ranks with the same weights.

        Where there are ``copies`` of what they share, each is over neighbours, an equal part of these ranks.
        """
        n = self.sizes.num_replicas // copies
        return self._seconds(num_bytes * (n - 1) / n, n, self.sizes.tp) if n > 1 else 0.0

    def copies_seconds(self, num_bytes: float, copies: int, *, of_experts: bool = False) -> float:
        """Return the time of summing so many bytes over the ranks in the same place of each copy."""
        sizes = self.sizes
        replicas, stride = sizes.num_replicas, sizes.tp
        if of_experts:
            replicas, stride = sizes.num_expert_replicas, sizes.ep * sizes.expert_tp
        apart = stride * (replicas // copies)
        return self._seconds(2 * num_bytes * (copies - 1) / copies, copies, apart) if copies > 1 else 0.0

    def expert_exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of giving each rank that holds other experts its part of so many bytes."""
        n = self.sizes.ep * self.sizes.expert_tp
        if n == 1:
            return 0.0
        here = min(n, GPUS_A_MACHINE)
        inside = num_bytes * (here - 1) / n / self.gpu.link_bandwidth
        # To other machines every rank has its own port.
        return _LATENCY_S + max(inside, num_bytes * (n - here) / n / self.gpu.network_bandwidth) / _LINK_SHARE

    def expert_gather_seconds(self, num_bytes: float) -> float:
        """Return the time of gathering or scattering so many bytes over the ranks that hold all experts."""
        n = self.sizes.ep * self.sizes.expert_tp
        return self._seconds(num_bytes * (n - 1) / n, n, 1) if n > 1 else 0.0

    def expert_replica_seconds(self, num_bytes: float, copies: int = 1) -> float:
        """Return the time of gathering or scattering so many bytes over the ranks with the same experts."""
        n = self.sizes.num_expert_replicas // copies
        stride = self.sizes.ep * self.sizes.expert_tp
        return self._seconds(num_bytes * (n - 1) / n, n, stride) if n > 1 else 0.0

    def pipeline_seconds(self, num_bytes: float) -> float:
        """Return the time of a message to the next stage."""
        stride = self.sizes.world_size // self.sizes.pp
        return self._seconds(num_bytes, 2, stride) if self.sizes.pp > 1 else 0.0

    def _seconds(self, num_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the time of bytes that a rank sends in a group whose ranks are ``stride`` apart.

        Of a group over several machines, the ranks in one machine share its way out.
        """
        bandwidth = self.gpu.link_bandwidth
        if num_ranks * stride > GPUS_A_MACHINE:
            ports = max(1, GPUS_A_MACHINE // stride)
            bandwidth = min(bandwidth, ports * self.gpu.network_bandwidth)
        return _LATENCY_S + num_bytes / (bandwidth * _LINK_SHARE)
