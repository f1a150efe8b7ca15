"""A checkpoint of another precision: what each of a run's tensors is filled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.collectives import any_rank
from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import ShardedTensor, dtype_name
from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX, OPTIMIZER_PREFIX, Float8Scaling, float8_tensors
from megatron.core.parallel_state import ParallelState

MAIN_PREFIX = OPTIMIZER_PREFIX + "main_param."


@dataclass(frozen=True, eq=False)
class PrecisionChange:
    """Hold a run's tensors under the names of what fills them, and the namespaces that are filled.

    ``is_needed`` is the same on every rank: some weight is stored in another precision. ``line`` says so.
    """

    tensors: Sequence[ShardedTensor]
    namespaces: Sequence[str]
    is_needed: bool = False
    line: str | None = None


def plan_precision(
    tensors: Sequence[ShardedTensor], namespaces: Sequence[str], index: CheckpointIndex, state: ParallelState
) -> PrecisionChange:
    """Return what fills the tensors of a run; collective.

    Weights that are stored in another precision come from the checkpoint's main parameters where it has them, and main
    parameters that it lacks from its weights where these have their precision. No value is rounded on its way to a
    main parameter.
    """
    changed = [
        (index.tensors[tensor.name].dtype, dtype_name(tensor.data.dtype))
        for tensor in tensors
        if tensor.name.startswith(MODEL_PREFIX)
        and tensor.name in index.tensors
        and index.tensors[tensor.name].dtype != dtype_name(tensor.data.dtype)
    ]
    if not any_rank(bool(changed), state.world):
        return PrecisionChange(tensors, namespaces)
    renamed = [replace(tensor, name=_origin(tensor, index)) for tensor in tensors]
    has_main_params = any(name.startswith(MAIN_PREFIX) for name in index.tensors)
    if has_main_params:
        namespaces = [MAIN_PREFIX if namespace == MODEL_PREFIX else namespace for namespace in namespaces]
    line = None
    if changed:
        origin = "main parameters" if has_main_params else "weights"
        stored, own = changed[0]
        line = f"precision: the checkpoint's weights are {stored}, this run's {own}: converted from its {origin}"
    return PrecisionChange(renamed, namespaces, True, line)


def _origin(tensor: ShardedTensor, index: CheckpointIndex) -> str:
    own = dtype_name(tensor.data.dtype)
    if tensor.name.startswith(MODEL_PREFIX):
        main = MAIN_PREFIX + tensor.name.removeprefix(MODEL_PREFIX)
        is_stored_so = tensor.name in index.tensors and index.tensors[tensor.name].dtype == own
        return main if main in index.tensors and not is_stored_so else tensor.name
    if tensor.name.startswith(MAIN_PREFIX) and tensor.name not in index.tensors:
        weight = index.tensors.get(MODEL_PREFIX + tensor.name.removeprefix(MAIN_PREFIX))
        if weight is not None and weight.dtype == own:
            return weight.name
    return tensor.name


@dataclass(frozen=True, eq=False)
class Float8Choice:
    """Hold the tensors of delayed scaling that go on from a checkpoint, or the line that says why they begin anew."""

    tensors: tuple[ShardedTensor, ...]
    line: str | None


def choose_float8(index: CheckpointIndex, float8: Float8Scaling | None, state: ParallelState) -> Float8Choice:
    """Choose to go on where the checkpoint has a history of the same layers and length."""
    tensors = tuple(float8_tensors(float8, state))
    stored = [index.tensors.get(tensor.name) for tensor in tensors]
    if all(have is not None and have.global_shape == want.global_shape for have, want in zip(stored, tensors)):
        return Float8Choice(tensors, None)
    if any(have is None for have in stored):
        reason = "the checkpoint holds none"
    else:
        reason = "those of the checkpoint have another --fp8-amax-history-len"
    return Float8Choice((), f"fp8: scales and amax histories begin anew, since {reason}")
