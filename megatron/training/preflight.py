"""Preflight: check the tokenizer, the data and host memory before training."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable

from megatron.checkpoint import saved_iterations
from megatron.config import RunConfig, read_nccl_options
from megatron.core.available_host_memory import HostRoom, available_bytes
from megatron.core.datasets import report_lost_pages
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.object_store import as_path
from megatron.core.optimizer import host_state_bytes
from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.data_plan import DatasetsProvider, sample_targets
from megatron.training.exit_reason import reasons_of, refuse_in_run
from megatron.training.initialize import LaunchEnvironment
from megatron.training.theoretical_memory_usage import least_offloaded_bytes, model_size, offloaded_bytes

_GIB = 2**30


def check_least_host_memory(config: RunConfig, room: HostRoom | None) -> None:
    """Reject an activation offload if the layers' inputs alone do not fit in the node's memory.

    This builds nothing and imports no torch, so that it rejects a command line quickly. `check_host_memory` counts the
    rest.

    Raises:
        ConfigurationError: they do not fit.
    """
    if room is None or not config.model.num_offloaded_layers:
        return
    needed, free = least_offloaded_bytes(config), room.available // room.num_processes
    if needed <= free:
        return
    numbers = reversed(range(1, config.model.num_offloaded_layers))
    fitting = (number for number in numbers if least_offloaded_bytes(_offloading(config, number)) <= free)
    most = next(fitting, None)
    raise ConfigurationError(
        f"offload needs at least {needed / _GIB:.1f} GiB of host memory per process for the inputs of layers alone, "
        f"{needed * room.num_processes / _GIB:.1f} GiB for {room.num_processes} processes, but "
        f"{room.available / _GIB:.1f} GiB are available; "
        + ("omit --cpu-offloading" if most is None else f"use --cpu-offloading-num-layers {most} or less")
    )


def check_host_memory(config: RunConfig, room: HostRoom | None) -> None:
    """Check that the offload of a node's processes fits in its memory, if the system reports how much is free.

    The total includes activations, weights, and the optimizer state if its fraction is known.

    Raises:
        ConfigurationError: it does not fit.
    """
    layers, state = (offloaded_bytes(config) if config.model.num_offloaded_layers else 0), _state_bytes(config)
    needed = layers + state
    if room is None or needed * room.num_processes <= room.available:
        return
    parts = {"activations and weights": layers, "the optimizer": state}
    named = " and ".join(f"{size / _GIB:.1f} GiB of {name}" for name, size in parts.items() if size)
    changes = [change for change in (_fewer_layers(config, room), _smaller_fraction(config, room)) if change]
    raise ConfigurationError(
        f"offload needs an estimated {needed / _GIB:.1f} GiB of host memory per process ({named}), "
        f"{needed * room.num_processes / _GIB:.1f} GiB for {room.num_processes} processes, but "
        f"{room.available / _GIB:.1f} GiB are available; "
        + (f"{' or '.join(changes)} would fit" if changes else f"omit {' and '.join(_switches(config))}")
    )


def _state_bytes(config: RunConfig) -> int:
    """Return the bytes of optimizer state that the most loaded rank offloads to host memory."""
    optimizer, replicas = config.optimizer, config.parallel_sizes.num_replicas
    if not optimizer.offload_fraction or optimizer.optimizer_offload_policy == "auto":
        return 0
    num_elements = max(model_size(config).trained)
    if config.ddp.shards_over(replicas):
        num_elements = -(-num_elements // config.ddp.num_shards(replicas))
    return host_state_bytes(optimizer, num_elements)


def _fewer_layers(config: RunConfig, room: HostRoom) -> str | None:
    """Suggest the largest number of offloaded layers that fits in addition to the optimizer state."""
    free = room.available // room.num_processes - _state_bytes(config)
    for number in reversed(range(1, config.model.num_offloaded_layers)):
        if offloaded_bytes(_offloading(config, number)) <= free:
            return f"--cpu-offloading-num-layers {number}"
    return None


def _offloading(config: RunConfig, num_layers: int) -> RunConfig:
    model = dataclasses.replace(config.model, cpu_offloading_num_layers=num_layers)
    return dataclasses.replace(config, model=model)


def _smaller_fraction(config: RunConfig, room: HostRoom) -> str | None:
    """Suggest the largest fraction of the optimizer state that fits in addition to the layers."""
    layers = offloaded_bytes(config) if config.model.num_offloaded_layers else 0
    state, free = _state_bytes(config), room.available // room.num_processes - layers
    hundredths = math.floor(100 * config.optimizer.offload_fraction * free / state) if state else 0
    if hundredths < 1:
        return None
    return f"--optimizer-offload-policy static --optimizer-offload-fraction {hundredths / 100}"


def _switches(config: RunConfig) -> list[str]:
    layers = ["--cpu-offloading"] if config.model.num_offloaded_layers else []
    return layers + (["the optimizer's offload"] if _state_bytes(config) else [])


def report_earlier_run(config: RunConfig, report: Callable[[str], None]) -> None:
    """Warn if the run starts from random weights and its save folder has a checkpoint.

    Raises:
        StorageError: the folder cannot be read.
    """
    save = config.checkpoint.save
    if save is None or config.checkpoint.load is not None or config.training.skip_train:
        return
    saved = saved_iterations(as_path(save))
    if saved:
        report(
            f"WARNING: {save} has a checkpoint of iteration {max(saved)}, and --load is not set: this run starts from "
            f"random weights and replaces that run; to resume it, pass --resume {save}"
        )


def prepare_data_or_exit(
    config: RunConfig, launch: LaunchEnvironment, datasets_provider: DatasetsProvider
) -> Tokenizer:
    """Build the run's tokenizer; end the program with status 2 if it, the data or the memory is unsuitable.

    Every rank checks, and only rank 0 prints. No index is built and nothing communicates. Host memory is compared with
    the minimum that an offload needs; `pretrain` compares it with the total, which it reads from the model.
    """

    def report(line: str) -> None:
        if launch.rank == 0:
            print(line, flush=True)

    report_lost_pages(launch.rank)
    try:
        if config.logging.brief_log:
            report_earlier_run(config, report)
        read_nccl_options(config.initialization.nccl_communicator_config_path)
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
        model, available = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size), available_bytes()
        room = None if available is None else HostRoom(available, launch.local_world_size)
        check_least_host_memory(dataclasses.replace(config, model=model), room)
        datasets_provider(config, tokenizer, sample_targets(config), report).check()
    except InputError as error:
        sys.exit(refuse_in_run(reasons_of(error), launch))
    return tokenizer
