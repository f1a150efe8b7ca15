"""What can be wrong with a checkpoint: damage, and a misfit with the model that is to be filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.core.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import StoredTensor, TensorDescription


class DamagedCheckpointError(CheckpointError):
    """Report a checkpoint whose files are missing, cut short or changed: an older one may still be whole."""


def find_misfits(
    wanted: Iterable[Sequence[TensorDescription]],
    stored: Mapping[str, StoredTensor],
    namespaces: Sequence[str],
    allow_cast: bool = False,
) -> list[str]:
    """List by name every tensor that is missing, unexpected, or of another shape or dtype.

    ``wanted`` holds all ranks' descriptions: a tensor is unexpected only if no rank wants it and its name begins with
    one of ``namespaces``. With ``allow_cast`` a differing dtype is no problem.
    """
    names: dict[str, TensorDescription] = {}
    for descriptions in wanted:
        for description in descriptions:
            names.setdefault(description.name, description)
    problems = [f"missing in the checkpoint: {name}" for name in sorted(names) if name not in stored]
    problems += [
        f"unexpected in the checkpoint: {name}"
        for name in sorted(stored)
        if name not in names and name.startswith(tuple(namespaces))
    ]
    for name in sorted(names.keys() & stored.keys()):
        have, want = stored[name], names[name]
        if have.global_shape != want.global_shape:
            problems.append(
                f"{name}: shape {list(have.global_shape)} in the checkpoint, {list(want.global_shape)} in this run"
            )
        elif have.dtype != want.dtype and not allow_cast:
            problems.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} in this run")
    return problems
