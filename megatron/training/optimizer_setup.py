"""Build the optimizer of a run: how much of it is offloaded, and whether the machine's memory suffices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from megatron.core.collectives import all_gather_objects
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigurationError
from megatron.core.kernels.apex import load_fused_adam
from megatron.core.optimizer.compact_state import STATE_DTYPES
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.planning.activation_estimate import activation_bytes
from megatron.training.config.run_config import RunConfig
from megatron.training.process.initialize import Runtime

_GIB = 2**30


def build_optimizer(
    config: RunConfig,
    runtime: Runtime,
    ddp_chunks: Sequence[DistributedDataParallel],
    log: Callable[[str], None],
) -> MegatronOptimizer:
    """Build the optimizer, and log in one line what is offloaded, if anything; collective.

    Raises:
        ConfigurationError: the machine has too little memory for what is offloaded.
    """
    optimizer = config.optimizer
    if optimizer.offload_fraction:
        num_elements = sum(part.end - part.start for chunk in ddp_chunks for part in chunk.parts)
        optimizer, why = _with_policy(config, runtime, num_elements)
        num_bytes = _host_bytes(optimizer, num_elements)
        _check_host_memory(num_bytes, optimizer.offload_fraction, runtime)
        log(
            f"optimizer offload: {optimizer.offload_fraction:.0%} of the main parameters and the optimizer's state, "
            f"{num_bytes / _GIB:.2f} GiB on this rank, in the machine's memory ({why})"
        )
    fused_adam = load_fused_adam() if runtime.device.is_cuda else None
    return make_optimizer(optimizer, ddp_chunks, runtime.state, fused_adam, runtime.device.host_copies)


def _with_policy(config: RunConfig, runtime: Runtime, num_elements: int) -> tuple[OptimizerConfig, str]:
    """Return the configuration with the fraction that all ranks offload, and where it comes from.

    Collective: all take the largest fraction that one of them needs, in whole hundredths.
    """
    optimizer = config.optimizer
    if optimizer.optimizer_offload_policy != "auto":
        return optimizer, "--optimizer-offload-policy static"
    free = runtime.device.free_bytes()
    if free is None:
        fraction, why = 1.0, "--optimizer-offload-policy auto: this device has no memory of its own to fill"
    else:
        activations, margin = activation_bytes(config, runtime.state.rank), optimizer.optimizer_offload_auto_threshold
        room = free - activations - margin
        needed = num_elements * _device_bytes(optimizer)
        # A rank without parameters needs nothing.
        fraction = min(max(math.ceil(100 * (1 - room / max(needed, 1))) / 100, 0.0), 1.0) if needed else 0.0
        why = (
            f"--optimizer-offload-policy auto: {free / _GIB:.2f} GiB of the device are free, for {needed / _GIB:.2f} "
            f"GiB of state, an estimated {activations / _GIB:.2f} GiB of activations and a margin of "
            f"{margin / _GIB:.2f} GiB"
        )
    fraction = max(all_gather_objects(fraction, runtime.state.world))
    # The policy has been followed: what the optimizer is given is a fraction.
    optimizer = dataclasses.replace(optimizer, optimizer_offload_policy="static", optimizer_offload_fraction=fraction)
    return optimizer, why


def _moment_bytes(optimizer: OptimizerConfig) -> int:
    if optimizer.optimizer != "adam":
        return 4 if optimizer.sgd_momentum else 0
    return STATE_DTYPES[optimizer.exp_avg_dtype].itemsize + STATE_DTYPES[optimizer.exp_avg_sq_dtype].itemsize


def _device_bytes(optimizer: OptimizerConfig) -> int:
    """Return the bytes that a parameter would take on the device: main parameter and moments."""
    is_rounded = optimizer.params_dtype in ("bfloat16", "float16")
    return (STATE_DTYPES[optimizer.main_params_dtype].itemsize if is_rounded else 0) + _moment_bytes(optimizer)


def _host_bytes(optimizer: OptimizerConfig, num_elements: int) -> int:
    """Return the bytes that the offloaded fraction takes on the host: there each main parameter is a copy."""
    return math.ceil(optimizer.offload_fraction * num_elements) * (4 + _moment_bytes(optimizer))


def _check_host_memory(num_bytes: int, fraction: float, runtime: Runtime) -> None:
    """Refuse an offload that any rank's machine has no memory for; collective."""
    available = runtime.device.host_bytes_a_process()
    for rank, (needed, room) in enumerate(all_gather_objects((num_bytes, available), runtime.state.world)):
        if room is not None and needed > room:
            raise ConfigurationError(
                f"optimizer offload needs {needed / _GIB:.2f} GiB of the machine's memory for rank {rank}, and "
                f"{room / _GIB:.2f} GiB are available for each process there; give --optimizer-offload-fraction "
                f"{math.floor(100 * fraction * room / needed) / 100} or less with --optimizer-offload-policy static, "
                "cut the state over more ranks with --use-distributed-optimizer, or end what else runs"
            )
