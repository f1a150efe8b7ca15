"""Weight check: which parameters hold values that no training step can use, where, and on which ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.errors import TrainingError
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, held_of

OUTLIER_RATIO = 1.0e3
"""How many times as large as its neighbours an element must be to be suspected, beside other evidence."""
ABSURD_RATIO = 1.0e6
"""How many times as large it must be to be wrong whatever else is seen: an exponent's bit makes it so."""

HUGE_WEIGHT = 1.0e3
"""The root mean square of a parameter's elements beyond which training has lost it."""


class BadWeightsError(TrainingError):
    """Report weights that hold what is not finite: no step can mend them, only a checkpoint from before."""


@dataclass(frozen=True)
class BadWeight:
    """Hold what is wrong with one parameter; ``first`` is the place of the first bad element in the global tensor.

    ``num_elements`` are those of the rank's own part.
    """

    name: str
    num_bad: int
    num_elements: int
    first: tuple[int, ...]
    value: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the finding as a message shows it."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return (
            f"{self.name} on {ranks}: {self.num_bad} of {self.num_elements} elements, the first at "
            f"{list(self.first)} is {self.value:g}"
        )


def find_bad_weights(parameters: Iterable[torch.Tensor]) -> list[BadWeight]:
    """Return the parameters of this rank that hold what is not finite; it waits for the device."""
    held = [each for parameter in parameters for each in held_of(parameter)]
    bad = {id(values) for values in not_finite([values for _, values in held])}
    return [_describe(spec, each.detach(), ~each.detach().isfinite()) for spec, each in held if id(each) in bad]


def not_finite(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of the floating-point tensors that hold what is not finite; it waits for the device once."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return []
    # The extremes are finite where all is: a maximum is NaN where anything is.
    extremes = torch.stack([torch.stack(tensor.detach().aminmax()).float().to("cpu") for tensor in floating])
    return [tensor for tensor, are_finite in zip(floating, extremes.isfinite().all(dim=1).tolist()) if not are_finite]


def find_outlying_weights(parameters: Iterable[torch.Tensor], ratio: float = OUTLIER_RATIO) -> list[BadWeight]:
    """Return the parameters of this rank with an element ``ratio`` times as large as the others are in the mean.

    Such an element is finite, and no training makes it: a bit of it was changed, or it was written by mistake.
    """
    found = []
    for spec, held in (each for parameter in parameters for each in held_of(parameter)):
        values = held.detach().abs().double()
        largest = values.max()
        others = (values.square().sum() - largest.square()).clamp(min=0.0)
        # What cancels in the difference is measured anew without the largest.
        if bool(others <= 1.0e-9 * largest.square()):
            others = torch.where(values == largest, 0.0, values).square().sum()
        mean = (others / max(values.numel() - 1, 1)).sqrt().clamp(min=1.0e-3)
        if values.numel() > 1 and bool(largest > ratio * mean):
            found.append(_describe(spec, held.detach(), values > ratio * mean))
    return found


def find_huge_weights(parameters: Iterable[torch.Tensor]) -> list[BadWeight]:
    """Return the parameters of this rank beyond `HUGE_WEIGHT` in the root mean square: training made them so."""
    found = []
    for spec, held in (each for parameter in parameters for each in held_of(parameter)):
        values = held.detach()
        if values.numel() and bool(values.double().square().mean().sqrt() > HUGE_WEIGHT):
            found.append(_describe(spec, values, values.abs() > HUGE_WEIGHT))
    return found


def gather_bad_weights(local: Sequence[BadWeight], world: Group) -> list[BadWeight]:
    """Return what all ranks have found, each parameter once with its ranks; collective."""
    found: dict[tuple[str, tuple[int, ...]], BadWeight] = {}
    for rank, reported in zip(world.ranks, all_gather_objects(list(local), world)):
        for weight in reported:
            known = found.setdefault((weight.name, weight.first), weight)
            found[weight.name, weight.first] = dataclasses.replace(known, ranks=(*known.ranks, rank))
    return list(found.values())


def describe_bad_weights(found: Sequence[BadWeight]) -> str:
    """Return the findings as one line names them, the first four in full."""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(map(str, found[:4])) + more


def _describe(spec: ParamSpec, values: torch.Tensor, bad: torch.Tensor) -> BadWeight:
    local = tuple(int(index) for index in bad.nonzero()[0].tolist())
    return BadWeight(spec.name, int(bad.sum()), values.numel(), _global_place(spec, local), float(values[local]))


def _global_place(spec: ParamSpec, local: tuple[int, ...]) -> tuple[int, ...]:
    """Return where an element of the local tensor lies in the global one; its own place where it is padding."""
    for piece in spec.pieces:
        box = piece.local_box
        if all(start <= at < start + length for at, start, length in zip(local, box.offset, box.shape)):
            return tuple(at - start + base for at, start, base in zip(local, box.offset, piece.global_box.offset))
    return local
