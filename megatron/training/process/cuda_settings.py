"""Environment variables that CUDA, its allocator and NCCL read when they start. The user's own values win.

- ``CUDA_DEVICE_MAX_CONNECTIONS=1`` makes kernels start in the order of their launches. Before Blackwell a matmul can
  otherwise start ahead of the communication that is to overlap with it, and delay it by occupying all SMs. FSDP
  gathers on a stream of its own, which one hardware queue would tie to the computation.
- ``PYTORCH_ALLOC_CONF=expandable_segments:True`` lets the allocator grow segments, so that freed blocks of unequal
  sizes leave no holes. The planner's memory assumes it.
- ``TORCH_NCCL_HIGH_PRIORITY=1`` makes NCCL's streams high-priority ones: the blocks of a communication that is launched
  while a matmul runs are scheduled ahead of the matmul's remaining blocks.
- ``TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING=0`` silences a warning for each pair of pipeline stages: sends
  of a process group wait for its other operations, and a pair has a process group for each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.training.config.run_config import RunConfig

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_BLACKWELL = 10


@dataclass(frozen=True)
class CudaSettings:
    """The variables to set, and the log line with these and with the variables that the user has set."""

    added: Mapping[str, str]
    line: str


def choose_cuda_settings(config: RunConfig, environment: Mapping[str, str], capability: int) -> CudaSettings:
    """Return the settings of a run; ``capability`` is the GPUs' major compute capability."""
    wanted = {_PRIORITY: "1"}
    sizes = config.parallel_sizes
    overlaps = sizes.tp > 1 or sizes.cp > 1
    if overlaps and not config.ddp.shards_weights and capability < _BLACKWELL:
        wanted[_CONNECTIONS] = "1"
    if sizes.pp > 1:
        wanted[_P2P_WARNING] = "0"
    if not environment.get(_OLD_ALLOCATOR):
        wanted[_ALLOCATOR] = "expandable_segments:True"
    names = (_CONNECTIONS, _ALLOCATOR, _OLD_ALLOCATOR, _PRIORITY, _P2P_WARNING)
    given = {name: environment[name] for name in names if environment.get(name)}
    added = {name: value for name, value in wanted.items() if name not in given}
    shown = [f"{name}={value}" for name, value in sorted(added.items())]
    shown += [f"{name}={value} (from the environment)" for name, value in sorted(given.items())]
    return CudaSettings(added, f"> CUDA settings: {', '.join(shown)}")
