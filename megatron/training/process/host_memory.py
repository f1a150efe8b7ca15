"""The machine's memory that a run would fill with what it takes off its devices, looked at before the run begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.planning.activation_memory import offloaded_bytes
from megatron.training.config.run_config import RunConfig

_GIB = 2**30
_MEMINFO = Path("/proc/meminfo")


def check_host_memory(config: RunConfig, num_processes: int, meminfo: Path = _MEMINFO) -> None:
    """See that what ``num_processes`` of this machine offload fits in its memory, where the system says what is free.

    Raises:
        ConfigurationError: it does not.
    """
    layers = config.model.num_offloaded_layers
    if not layers:
        return
    needed, available = offloaded_bytes(config), _available_bytes(meminfo)
    if available is None or needed * num_processes <= available:
        return
    fitting = [number for number in range(1, layers) if _needed_for(config, number) * num_processes <= available]
    change = f"--cpu-offloading-num-layers {fitting[-1]} fits" if fitting else "leave --cpu-offloading out"
    raise ConfigurationError(
        f"--cpu-offloading-num-layers {layers} needs {needed / _GIB:.1f} GiB of the machine's memory for each process, "
        f"{needed * num_processes / _GIB:.1f} GiB for {num_processes} of them, and {available / _GIB:.1f} GiB are "
        f"available; {change}"
    )


def _needed_for(config: RunConfig, layers: int) -> int:
    model = dataclasses.replace(config.model, cpu_offloading_num_layers=layers)
    return offloaded_bytes(dataclasses.replace(config, model=model))


def _available_bytes(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
