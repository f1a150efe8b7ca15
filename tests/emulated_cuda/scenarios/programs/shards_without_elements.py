"""Gather a small parameter in fp8 over so many ranks that the shards of some hold none of its elements."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import select_device
from megatron.core.distributed.flat_parameters import Float8FlatParameters, send_in_float8
from megatron.core.distributed.param_layout import plan_layout
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state

ROWS, COLUMNS = 8, 16


def main() -> None:
    """Run on the ranks of the environment; the parameter fills the shard of the first."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    size = dist.get_world_size()
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60))
    weight = nn.Parameter(torch.full((ROWS, COLUMNS), 1.0 + dist.get_rank(), device=device.torch_device))
    send_in_float8(weight)
    layout = plan_layout([weight.numel()], num_shards=size)
    assert layout.buckets[0].shard(1, size)[0] >= weight.numel(), "the second rank has elements"
    flat = Float8FlatParameters([weight], layout, state.dp)
    for is_async in (False, True):
        flat.start_gather(is_async)
        flat.wait_for_all()
        flat.start_gather_of(0, is_async)
        flat.wait_for_all()
    assert weight.eq(1.0).all(), "the first rank's elements have not arrived"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
