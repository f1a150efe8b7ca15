"""Ask a device what there is to ask, and measure small copies and collectives, as the doctor and the planner do."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.cli.doctor.benchmarks import REDUCTIONS, measure_collective, measure_host_copies, measure_peer_copies
from megatron.cli.doctor.gpus import query_torch
from megatron.core.device import Device, compute_capability, seeded_generator, select_device
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state

NUM_BYTES = 4096


def examine(device: Device) -> None:
    """Ask for everything that a device answers."""
    seen = query_torch()
    assert len(seen.names) == torch.cuda.device_count()
    assert device.peak_tflops("bfloat16")
    assert device.free_bytes()
    assert device.used_bytes() is not None
    assert device.pinned_bytes() is not None
    assert device.memory_use().reserved >= 0
    device.synchronize()
    assert device.queue_state() == "idle"
    assert not device.has_work_left()
    assert device.has_peers()
    assert compute_capability(device.torch_device)
    drawn = []
    for seed in (11, 12, 11):
        device.seed_default_generator(seed)
        drawn.append(torch.rand(4, device=device.torch_device))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    state = device.get_rng_state()
    first = torch.rand(4, device=device.torch_device)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device=device.torch_device))
    with seeded_generator(device.torch_device, 5):
        first = torch.rand(2, device=device.torch_device)
    device.set_rng_state(state)
    with seeded_generator(device.torch_device, 5):
        assert torch.equal(first, torch.rand(2, device=device.torch_device))
    for bandwidth in measure_host_copies(device, NUM_BYTES).values():
        assert bandwidth.bus_bytes_per_s > 0
    assert measure_peer_copies([Device("cuda", 0), Device("cuda", 1)], NUM_BYTES)
    x = torch.ones(64, 64, device=device.torch_device)
    assert device.time_calls(lambda: x @ x, 3) >= 0.0
    device.empty_cache()


def main() -> None:
    """Examine this rank's device, and what connects it with the others."""
    device = select_device(int(os.environ.get("LOCAL_RANK", "0")))
    device.make_current()
    examine(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group(device.default_backend, device_id=device.torch_device)
        world = create_parallel_state(ParallelSizes(dp=size), timedelta(seconds=60)).world
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            for reduction in REDUCTIONS:
                assert measure_collective(operation, NUM_BYTES, world, device, reduction).bus_bytes_per_s > 0
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
