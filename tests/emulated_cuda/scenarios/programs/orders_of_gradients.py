"""Complete unlike gradients on each rank, in another order: all ranks reduce the same buckets in one order."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device, select_device
from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces

LENGTHS = (256, 512, 1024)


def wrapped(device: Device, state: ParallelState, strategy: str) -> DistributedDataParallel:
    """Return parameters that have a bucket each."""
    model = nn.Module()
    for length in LENGTHS:
        parameter = nn.Parameter(torch.ones(length, device=device.torch_device))
        attach_spec(parameter, ParamSpec(f"of_{length}", (length,), full_pieces((length,))))
        model.register_parameter(f"of_{length}", parameter)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, ddp_bucket_size=1, data_parallel_sharding_strategy=strategy
    )
    ddp = DistributedDataParallel(model, config, state)
    assert len(ddp.grad_buffers[0].buckets) == len(LENGTHS)
    return ddp


def add_ones(parameter: torch.Tensor) -> None:
    """Add a gradient as a backward pass does."""
    main_grad = main_grad_of(parameter)
    assert main_grad is not None
    main_grad.add(torch.ones_like(parameter))


def main() -> None:
    """Run on two ranks."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60))
    is_first = dist.get_rank() == 0

    ddp = wrapped(device, state, "no_shard")
    parameters = list(ddp.parameters())
    for parameter in reversed(parameters) if is_first else parameters:
        add_ones(parameter)
    ddp.finish_grad_sync()
    assert all(part.gradient.eq(1.0).all() for part in ddp.parts)

    ddp = wrapped(device, state, "optim_grads")
    (buffer,) = ddp.grad_buffers
    reduced_first = buffer.parameters_of(buffer.buckets[0])
    with ddp.no_sync():
        # The second rank uses the parameters of one bucket only.
        for bucket in buffer.buckets if is_first else buffer.buckets[:1]:
            for parameter in buffer.parameters_of(bucket):
                add_ones(parameter)
    for bucket in buffer.buckets:
        for parameter in buffer.parameters_of(bucket):
            add_ones(parameter)
    ddp.finish_grad_sync()
    for part in ddp.parts:
        is_used = any(part.parameter is parameter for parameter in reduced_first)
        assert part.gradient.eq(2.0 if is_used else 1.5).all(), part.gradient
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
