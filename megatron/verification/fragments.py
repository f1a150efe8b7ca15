"""Global tensors put together from the boxes that ranks hold, and compared element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.sharding import Box, ParamSpec

Array = NDArray[np.float64]

_GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True, eq=False)
class Fragment:
    """Hold one box of a global tensor as one rank has it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    values: Array
    rank: int


@dataclass(frozen=True)
class Mismatch:
    """Name the first element in which a rank's tensor differs from the reference, and by how much the tensor does."""

    name: str
    rank: int
    index: tuple[int, ...]
    actual: float
    expected: float
    relative_difference: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"{self.name}: rank {self.rank}, first differing element {list(self.index)}: {self.actual!r} instead of "
            f"{self.expected!r}; relative difference of the tensor {self.relative_difference:.3e}"
        )


def fragments_of(spec: ParamSpec, tensor: torch.Tensor, rank: int, name: str | None = None) -> list[Fragment]:
    """Cut a local tensor of a parameter's shape into the boxes that it holds of the global one; padding is left out."""
    return [
        Fragment(
            name or spec.name,
            spec.global_shape,
            piece.global_box,
            tensor.detach()[piece.local_box.slices].to(torch.float64).cpu().numpy().copy(),
            rank,
        )
        for piece in spec.pieces
    ]


def assemble(fragments: Iterable[Fragment]) -> dict[str, Array]:
    """Return the global tensors; elements that no rank holds are NaN."""
    tensors: dict[str, Array] = {}
    for fragment in fragments:
        whole = tensors.setdefault(fragment.name, np.full(fragment.global_shape, np.nan))
        whole[fragment.box.slices] = fragment.values
    return tensors


def gradient_floor(reference: Mapping[str, Array]) -> float:
    """Return the size below which a gradient tensor's difference is not held against its own size.

    A key's bias has a gradient that is zero in exact arithmetic: what remains is rounding of the other gradients.
    """
    return _GRADIENT_FLOOR * max(float(np.abs(tensor).max()) for tensor in reference.values())


def compare(
    fragments: Iterable[Fragment], reference: Mapping[str, Array], tolerance: float, floor: float = 0.0
) -> tuple[list[Mismatch], float]:
    """Compare every rank's boxes, copies included, with the reference; return the mismatches and the worst difference.

    Two tensors agree where ``max |a - b| <= tolerance * max(max |b|, floor)``, taken per global tensor.
    """
    mismatches = []
    worst = 0.0
    seen: dict[str, int] = {}
    for fragment in fragments:
        expected_whole = reference.get(fragment.name)
        if expected_whole is None:
            mismatches.append(Mismatch(f"{fragment.name} (unknown)", fragment.rank, (), np.nan, np.nan, np.inf))
            continue
        expected = expected_whole[fragment.box.slices]
        seen[fragment.name] = seen.get(fragment.name, 0) + fragment.values.size
        scale = max(float(np.abs(expected_whole).max()), floor) or 1.0
        difference = np.abs(fragment.values - expected)
        # A NaN is further off than any number.
        largest = float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)) / scale
        worst = max(worst, largest)
        if largest > tolerance:
            mismatches.append(_first_difference(fragment, expected, tolerance * scale, largest))
    for name, tensor in reference.items():
        if seen.get(name, 0) < tensor.size:
            mismatches.append(Mismatch(f"{name} (held by no rank in part)", -1, (), np.nan, np.nan, np.inf))
            worst = np.inf
    return mismatches, worst


def _first_difference(fragment: Fragment, expected: Array, allowed: float, relative: float) -> Mismatch:
    off = ~(np.abs(fragment.values - expected) <= allowed)
    place = tuple(int(i) for i in np.argwhere(off)[0])
    index = tuple(start + i for start, i in zip(fragment.box.offset, place))
    return Mismatch(
        fragment.name, fragment.rank, index, float(fragment.values[place]), float(expected[place]), relative
    )
