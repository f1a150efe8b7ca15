"""Which tensors of a run's state a rank holds alone, and so writes itself, in Megatron's formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX, OPTIMIZER_PREFIX
from megatron.core.process_group import Group
from megatron.interop.megatron_torch.experts.expert_keys import CHOOSING_BIAS


def prefixes_held_apart(ddp: Mapping[str, Any], replicas: Group) -> tuple[str, ...]:
    """Return how names begin of what this rank alone holds, or the first of copies, from a run's configuration.

    ``replicas`` are the ranks over which it is sharded: others for experts than for all else.
    """
    levels = replicas.levels
    if levels is not None and not levels[1].is_first:
        return ()
    if ddp["data_parallel_sharding_strategy"] == "optim_grads_params":
        return MODEL_PREFIX, OPTIMIZER_PREFIX
    return (OPTIMIZER_PREFIX,) if ddp["use_distributed_optimizer"] else ()


def is_held_apart(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether this rank alone holds its part of a tensor; what is not trained all of them hold whole."""
    return name.startswith(prefixes) and not name.endswith(CHOOSING_BIAS)
