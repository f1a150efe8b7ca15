"""Build the optimizer of a run: how much of it is offloaded, and whether the machine's memory suffices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from megatron.core.collectives import any_rank
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.inner_optimizer import examine_rule, load_fused_adam
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, host_state_bytes, state_bytes
from megatron.core.optimizer.param_rates import ParamRates
from megatron.core.parallel_state import all_gather_from_world
from megatron.core.sharding import spec_of
from megatron.training.activation_estimate import activation_bytes
from megatron.training.config.run_config import RunConfig
from megatron.training.process.host_memory import check_host_memory
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
        ConfigurationError: the machine has too little memory for what is offloaded, a pattern of
            --param-group-overrides matches no parameter, Muon is given no matrix, or checkpoints would not hold the
            update rule's whole state.
    """
    optimizer = config.optimizer
    _check_saved(config)
    _check_buffers(config, ddp_chunks)
    if optimizer.offload_fraction:
        num_elements = sum(part.end - part.start for chunk in ddp_chunks for part in chunk.parts)
        optimizer, why = _with_policy(config, runtime, num_elements)
        num_bytes = host_state_bytes(optimizer, num_elements)
        if config.optimizer.optimizer_offload_policy == "auto":
            # What is static was looked at before there were processes.
            _check_host_memory(dataclasses.replace(config, optimizer=optimizer), runtime)
        log(
            f"optimizer offload: {optimizer.offload_fraction:.0%} of the main parameters and the optimizer's state, "
            f"{num_bytes / _GIB:.2f} GiB on this rank, in the machine's memory ({why})"
        )
    trained = [p for chunk in ddp_chunks for p in chunk.parameters() if p.requires_grad]
    ParamRates(optimizer).check_patterns(trained, runtime.state.world)
    has_matrices = any(is_orthogonalized(spec_of(parameter)) for parameter in trained)
    if optimizer.optimizer == "muon" and not any_rank(has_matrices, runtime.state.world):
        raise ConfigurationError(
            "--optimizer muon updates matrices between the embeddings and the output layer, and this model trains "
            "none; give --optimizer adam"
        )
    fused_adam = load_fused_adam() if runtime.device.is_cuda else None
    return make_optimizer(optimizer, ddp_chunks, runtime.state, fused_adam, runtime.device.host_copies)


def _check_saved(config: RunConfig) -> None:
    """Reject an update rule whose state would be lost on the way through a checkpoint of this run."""
    checkpoint = config.checkpoint
    rule = examine_rule(config.optimizer)
    is_saved = (checkpoint.save or checkpoint.local_save) and not checkpoint.no_save_optim
    if rule.unsaved and is_saved:
        raise ConfigurationError(
            f"--optimizer {config.optimizer.elementwise}: {rule.name} keeps state that a checkpoint would not hold: "
            f"{', '.join(rule.unsaved)}; keep it as tensors or numbers in state[parameter], which are saved, or give "
            "--no-save-optim"
        )


def _check_buffers(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Reject a module with a persistent buffer if the run saves checkpoints, which hold parameters only.

    Raises:
        ConfigurationError: there is one; perhaps on some ranks only.
    """
    if not (config.checkpoint.save or config.checkpoint.local_save):
        return
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                raise ConfigurationError(
                    f"{path}.{name}".lstrip(".")
                    + " is a persistent buffer, and checkpoints hold parameters only; make it a "
                    "parameter with a ParamSpec, or register it with persistent=False if it can be computed again"
                )


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
        needed = num_elements * state_bytes(optimizer)
        # A rank without parameters needs nothing.
        fraction = min(max(math.ceil(100 * (1 - room / max(needed, 1))) / 100, 0.0), 1.0) if needed else 0.0
        why = (
            f"--optimizer-offload-policy auto: {free / _GIB:.2f} GiB of the device are free, for {needed / _GIB:.2f} "
            f"GiB of state, {activations / _GIB:.2f} GiB of activations and a margin of "
            f"{margin / _GIB:.2f} GiB"
        )
    fraction = max(of_rank[0] for of_rank in all_gather_from_world([fraction], runtime.state))
    # The policy has been followed: what the optimizer is given is a fraction.
    optimizer = dataclasses.replace(optimizer, optimizer_offload_policy="static", optimizer_offload_fraction=fraction)
    return optimizer, why


def _check_host_memory(config: RunConfig, runtime: Runtime) -> None:
    """Refuse an offload that any rank's machine has no memory for; collective."""
    for (room,) in all_gather_from_world([runtime.device.host_room()], runtime.state):
        check_host_memory(config, room)
