"""Update and read weights after steps without a forward pass, which would wait for the parameters of each module."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device, select_device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import check_weights
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards

SHAPES = {"matrix": (64, 128), "bias": (128,)}
DECAY = 0.5


def built(device: Device, state: ParallelState) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Return parameters that are gathered while a forward pass runs, and their optimizer."""
    model = nn.Module()
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.ones(shape, device=device.torch_device))
        attach_spec(parameter, ParamSpec(f"{name}.weight", shape, full_shards(shape)))
        model.register_parameter(name, parameter)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    ddp = DistributedDataParallel(model, config, state)
    return ddp, make_optimizer(OptimizerConfig(lr=1e-2, ema_decay=DECAY), [ddp], state)


def values(ddp: DistributedDataParallel) -> list[float]:
    """Return the sums of the parameters."""
    return [parameter.detach().sum().item() for parameter in ddp.parameters()]


def main() -> None:
    """Run on the ranks of the environment, two of which share each part of the model."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, device_id=device.torch_device)
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size() // 2), timedelta(seconds=60))
    ddp, optimizer = built(device, state)
    for buffer in ddp.grad_buffers:
        buffer.grad_data.fill_(1.0)
    # The second update begins while the parameters of the first are gathered: the norm has another communicator.
    assert optimizer.step().success
    assert optimizer.step().success
    check_weights([ddp], state.world)
    assert optimizer.step().success
    with optimizer.averaged_weights():
        averaged = values(ddp)
    after = values(ddp)
    assert all(a < b for a, b in zip(after, averaged)), (after, averaged)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
