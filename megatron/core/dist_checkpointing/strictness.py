"""What can be wrong with a checkpoint: damage, and a misfit with the model that is to be filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.index import StoredTensor
    from megatron.core.dist_checkpointing.mapping import TensorDescription


@dataclass(frozen=True)
class Strictness:
    """Say what tensors that are on one side only mean.

    ``allows_missing``: a tensor of the run that the checkpoint lacks keeps its value, and is listed.
    ``allows_unexpected``: a tensor of the checkpoint that the run lacks is passed over; ``lists_unexpected``, by name.
    """

    allows_missing: bool = False
    allows_unexpected: bool = False
    lists_unexpected: bool = False


STRICT = Strictness()

STRICTNESS: Mapping[str, Strictness] = {
    "raise_all": STRICT,
    "raise_unexpected": Strictness(allows_unexpected=True),
    "assume_ok_unexpected": Strictness(allows_unexpected=True),
    "log_all": Strictness(allows_missing=True, allows_unexpected=True, lists_unexpected=True),
    "log_unexpected": Strictness(allows_missing=True, allows_unexpected=True),
    "return_all": Strictness(allows_missing=True, allows_unexpected=True, lists_unexpected=True),
    "return_unexpected": Strictness(allows_missing=True, allows_unexpected=True),
    "ignore_all": Strictness(allows_missing=True, allows_unexpected=True),
}
"""What each value of ``--dist-ckpt-strictness`` means. To Megatron, a tensor that the checkpoint lacks is unexpected.

No random value stays in silence: what was left alone is listed by all that allow it.
"""


@dataclass(frozen=True)
class Misfits:
    """Hold the names of tensors on one side only, and a line for each that has another shape or dtype."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]

    def problems(self, strictness: Strictness = STRICT) -> list[str]:
        """Return a line for everything that is refused."""
        problems = []
        if not strictness.allows_missing:
            problems += [f"missing in the checkpoint: {name}" for name in self.missing]
        if not strictness.allows_unexpected:
            problems += [f"unexpected in the checkpoint: {name}" for name in self.unexpected]
        return [*problems, *self.different]


def find_misfits(
    wanted: Iterable[Sequence[TensorDescription]],
    stored: Mapping[str, StoredTensor],
    namespaces: Sequence[str],
    allow_cast: bool = False,
) -> Misfits:
    """Find every tensor that is missing, unexpected, or of another shape or dtype.

    ``wanted`` holds all ranks' descriptions: a tensor is unexpected only if no rank wants it and its name begins with
    one of ``namespaces``. With ``allow_cast`` a differing dtype is no problem.
    """
    names: dict[str, TensorDescription] = {}
    for descriptions in wanted:
        for description in descriptions:
            names.setdefault(description.name, description)
    different = []
    for name in sorted(names.keys() & stored.keys()):
        have, want = stored[name], names[name]
        if have.global_shape != want.global_shape:
            different.append(
                f"{name}: shape {list(have.global_shape)} in the checkpoint, {list(want.global_shape)} in this run"
            )
        elif have.dtype != want.dtype and not allow_cast:
            different.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} in this run")
    return Misfits(
        missing=tuple(sorted(names.keys() - stored.keys())),
        unexpected=tuple(sorted(n for n in stored.keys() - names.keys() if n.startswith(tuple(namespaces)))),
        different=tuple(different),
    )
