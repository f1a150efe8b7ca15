"""Complete gradients in another order on each rank: buckets are reduced in one order nevertheless."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import select_device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards

LENGTHS = (256, 512, 1024)


def main() -> None:
    """Run on the ranks of the environment."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60))
    model = nn.Module()
    for length in LENGTHS:
        parameter = nn.Parameter(torch.ones(length, device=device.torch_device))
        attach_spec(parameter, ParamSpec(f"of_{length}", (length,), full_shards((length,))))
        model.register_parameter(f"of_{length}", parameter)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1)
    ddp = DistributedDataParallel(model, config, state)
    assert len(ddp.grad_buffers[0].buckets) == len(LENGTHS)
    parameters = list(ddp.parameters())
    numbered = list(enumerate(parameters, 1))
    for number, parameter in numbered if dist.get_rank() else reversed(numbered):
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        main_grad.add(torch.full_like(parameter, number * (dist.get_rank() + 1)))
    ddp.finish_grad_sync()
    mean_factor = (dist.get_world_size() + 1) / 2
    for number, parameter in numbered:
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        assert main_grad.tensor.eq(number * mean_factor).all(), "a gradient is not the mean of those of the ranks"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
