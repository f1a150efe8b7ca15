"""Leave parameters without a gradient in some micro-batches of some ranks: buckets are reduced on all ranks anyway."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device, select_device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards

LENGTHS = (256, 512, 1024)
USED = (((0, 1, 2), (1, 2)), ((0,), (0, 1, 2)), ((2,), (1,)), ((0,), (1, 2)))
"""The parameters that each rank uses in each micro-batch, one at least."""
KINDS = (
    DistributedDataParallelConfig(ddp_bucket_size=1),
    DistributedDataParallelConfig(ddp_bucket_size=1, overlap_grad_reduce=True),
    DistributedDataParallelConfig(ddp_bucket_size=1, overlap_grad_reduce=True, use_distributed_optimizer=True),
    DistributedDataParallelConfig(ddp_bucket_size=1, data_parallel_sharding_strategy="optim_grads"),
    DistributedDataParallelConfig(
        ddp_bucket_size=1, data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True
    ),
)


def built(device: Device, state: ParallelState, config: DistributedDataParallelConfig) -> DistributedDataParallel:
    """Return parameters with a bucket each."""
    model = nn.Module()
    for length in LENGTHS:
        parameter = nn.Parameter(torch.ones(length, device=device.torch_device))
        attach_spec(parameter, ParamSpec(f"of_{length}", (length,), full_shards((length,))))
        model.register_parameter(f"of_{length}", parameter)
    ddp = DistributedDataParallel(model, config, state)
    assert not config.overlap_grad_reduce or len(ddp.grad_buffers[0].buckets) == len(LENGTHS)
    return ddp


def expected(number: int, microbatches: list[int]) -> float:
    """Return the mean over two ranks of what they add to a parameter."""
    added = [
        (microbatch + 1) * (rank + 1.0)
        for microbatch in microbatches
        for rank in (0, 1)
        if number in USED[microbatch][rank]
    ]
    return (number + 1) * sum(added) / 2


def run_step(ddp: DistributedDataParallel, microbatches: list[int]) -> None:
    """Add gradients in some micro-batches, and compare their sums."""
    rank, parameters = dist.get_rank(), list(ddp.parameters())
    ddp.zero_grad_buffer()
    for microbatch in microbatches:
        with nullcontext() if microbatch == microbatches[-1] else ddp.no_sync():
            for number in reversed(USED[microbatch][rank]):
                main_grad = main_grad_of(parameters[number])
                assert main_grad is not None
                main_grad.add(torch.full_like(parameters[number], (number + 1) * (microbatch + 1) * (rank + 1.0)))
    ddp.finish_grad_sync()
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for part in ddp.shards:
        mean = expected(numbers[id(part.parameter)], microbatches)
        assert part.gradient.eq(mean).all(), f"{part.spec.name}: {part.gradient[0].item()} instead of {mean}"


def main() -> None:
    """Run on two ranks."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    state = create_parallel_state(ParallelSizes(), timedelta(seconds=60))
    for config in KINDS:
        ddp = built(device, state, config)
        for microbatches in ([0, 1, 2], [2, 0], [3], [3, 1, 2, 0]):
            run_step(ddp, microbatches)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
