"""Gather sharded weights and free them without a use, as a pass does that is interrupted, and take their memory."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import select_device
from megatron.core.distributed.fully_sharded_data_parallel import WeightShards
from megatron.core.distributed.param_layout import plan_layout
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state


def main() -> None:
    """Run on the ranks of the environment."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    size = dist.get_world_size()
    state = create_parallel_state(ParallelSizes(dp=size), timedelta(seconds=60))
    weight = nn.Parameter(torch.ones(512, 256, device=device.torch_device))
    layout = plan_layout([weight.numel()], num_shards=size)
    shards = WeightShards([weight], layout, state.dp)
    shards.begin(0)
    shards.free(0)
    # Memory of the same size, which the allocator may take from where the weight was.
    assert torch.zeros_like(torch.empty(512, 256, device=device.torch_device)).sum().item() == 0
    shards.use(0)
    assert weight.sum().item() == weight.numel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
