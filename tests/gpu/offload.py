"""Offloaded optimizer state on a device: how far its parameters come to lie from those of state on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards

NUM_STEPS = 4


def offload_distance(device: Device, rows: int, **options: Any) -> float:
    """Return the largest difference of a bfloat16 parameter after some steps, of all parameters in -1 to 1.

    The matrix has ``rows`` rows of 1,024. The gradients are the same, and new ones overwrite them as soon as a step
    has been begun, as those of the next iteration do.
    """
    plain = _trained(device, rows)
    offloaded = _trained(device, rows, optimizer_cpu_offload=True, **options)
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(plain, offloaded, strict=True))


def _trained(device: Device, rows: int, **options: Any) -> list[torch.Tensor]:
    model = nn.Module()
    generator = torch.Generator(device.torch_device).manual_seed(1)
    for name, shape in (("matrix", (rows, 1024)), ("norm", (1000,))):
        values = torch.rand(shape, generator=generator, device=device.torch_device) * 2 - 1
        parameter = nn.Parameter(values.bfloat16())
        attach_spec(parameter, ParamSpec(f"{name}.weight", shape, full_shards(shape)))
        model.register_parameter(name, parameter)
    state = describe_parallel_state(0, 1)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    config = OptimizerConfig(lr=1e-2, params_dtype="bfloat16", **options)
    optimizer = MegatronOptimizer(config, [ddp], state, None, device.host_copies)
    for _ in range(NUM_STEPS):
        for buffer in ddp.grad_buffers:
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator, device=device.torch_device))
        assert optimizer.step().success
    return [parameter.detach() for parameter in ddp.parameters()]
