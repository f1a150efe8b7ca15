"""Seeds, and how processes find each other."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializationConfig:
    """Hold the seed and the process groups' backend."""

    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    deterministic_mode: bool = False
    """Use only algorithms that give the same bits again."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo"))
    """Backend of the process groups; nccl becomes gloo where there is no CUDA."""
    distributed_timeout_minutes: int = 10
    """Minutes after which a collective that does not end is an error."""
    local_rank: int | None = flag(None, aliases=("--local_rank",))
    """Device of this process on its node; the environment's LOCAL_RANK is used where it is set."""
