"""Name a run's tensors in a checkpoint: weights, optimizer state, weight averages, and RNG streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor, from_spec, whole_tensor
from megatron.core.model_parallel_config import GRID_AXES, Place
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import ParamSpec, held_of

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
AVERAGE_PREFIX = OPTIMIZER_PREFIX + "ema."
RNG_PREFIX = "rng."
FLOAT8_PREFIX = "float8."


class CheckpointableOptimizer(Protocol):
    """What a checkpoint asks of an optimizer."""

    def sharded_state(self) -> dict[str, tuple[ParamSpec, torch.Tensor]]:
        """Return every tensor of the state, made first where it does not exist yet, under keys of any kind.

        The names in the checkpoint are those of the descriptions: layout-independent, and beginning with
        ``optimizer.``. The tensors are the optimizer's own: loading fills them in place.
        """

    def scalar_state(self) -> dict[str, Any]:
        """Return the rest of the state as plain JSON values."""

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Take over what `scalar_state` returned."""

    def restart_average(self) -> None:
        """Begin the average of the weights anew, if there is one."""


class Float8Scaling(Protocol):
    """What a checkpoint asks of fp8's delayed scaling."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what is saved, by name; loading fills it in place."""

    def loaded(self) -> None:
        """Note that the tensors were filled."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """Hold the objects whose tensors a checkpoint saves and fills.

    ``models`` are this rank's model chunks, ``rng`` the state of each named stream of random numbers, ``float8`` what
    fp8's delayed scaling remembers of the whole model, the same on every rank.
    """

    models: Sequence[torch.nn.Module]
    optimizer: CheckpointableOptimizer | None = None
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)
    float8: Float8Scaling | None = None


def model_tensors(models: Sequence[torch.nn.Module]) -> list[ShardedTensor]:
    """Describe every parameter of the model chunks; buffers are not part of a checkpoint."""
    tensors = []
    for model in models:
        for name, parameter in model.named_parameters():
            assert hasattr(parameter, "spec"), f"parameter {name} carries no spec"
            tensors += [from_spec(spec.with_prefix(MODEL_PREFIX), values) for spec, values in held_of(parameter)]
    return tensors


def optimizer_tensors(optimizer: CheckpointableOptimizer) -> list[ShardedTensor]:
    """Describe every tensor of the optimizer's state; several may be parts of one global tensor."""
    tensors = [from_spec(spec, tensor) for spec, tensor in optimizer.sharded_state().values()]
    for tensor in tensors:
        assert tensor.name.startswith(OPTIMIZER_PREFIX), f"{tensor.name} does not begin with {OPTIMIZER_PREFIX}"
    return tensors


def rng_tensors(rng: Mapping[str, torch.Tensor], state: ParallelState) -> list[ShardedTensor]:
    """Describe this rank's random number streams, named by its place in the grid."""
    return [whole_tensor(rng_name(stream, state.place), tensor) for stream, tensor in sorted(rng.items())]


def float8_tensors(float8: Float8Scaling | None, state: ParallelState) -> list[ShardedTensor]:
    """Describe what delayed scaling remembers; the first rank of a model copy owns it."""
    is_owner = state.tp.is_first and state.pp.is_first
    tensors = {} if float8 is None else float8.tensors()
    return [replace(whole_tensor(FLOAT8_PREFIX + name, each), is_owner=is_owner) for name, each in tensors.items()]


def rng_name(stream: str, place: Place) -> str:
    """Return the name of a random number stream of the rank at a place in the grid."""
    return RNG_PREFIX + "".join(f"{axis}{place[axis]}." for axis in GRID_AXES) + stream


@dataclass(frozen=True, eq=False)
class AverageChoice:
    """Hold the optimizer's tensors that a checkpoint fills, and the namespaces that must be filled.

    ``line`` is there where the averages begin anew, with the loaded weights.
    """

    tensors: tuple[ShardedTensor, ...]
    namespaces: tuple[str, ...]
    line: str | None = None


def average_choice(tensors: Sequence[ShardedTensor], index: CheckpointIndex) -> AverageChoice:
    """Choose what is loaded of an optimizer's state: averages only where both have them."""
    is_wanted = any(tensor.name.startswith(AVERAGE_PREFIX) for tensor in tensors)
    is_stored = any(name.startswith(AVERAGE_PREFIX) for name in index.tensors)
    if is_wanted == is_stored:
        return AverageChoice(tuple(tensors), (OPTIMIZER_PREFIX,))
    if is_wanted:
        others = tuple(tensor for tensor in tensors if not tensor.name.startswith(AVERAGE_PREFIX))
        line = "--ema-decay: the average begins with the loaded weights, since the checkpoint holds none"
        return AverageChoice(others, (OPTIMIZER_PREFIX,), line)
    kinds = {name.split(".")[1] for name in index.tensors if name.startswith(OPTIMIZER_PREFIX)}
    namespaces = sorted(f"{OPTIMIZER_PREFIX}{kind}." for kind in kinds)
    return AverageChoice(tuple(tensors), tuple(name for name in namespaces if name != AVERAGE_PREFIX))
