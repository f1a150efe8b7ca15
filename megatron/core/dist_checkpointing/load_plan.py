"""What a rank reads of a stored checkpoint, in cells that all ranks cut alike: pure functions of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.index import StoredPiece, StoredTensor
from megatron.core.dist_checkpointing.mapping import TensorDescription, dtype_of
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box, Piece, describe_box, subtract, uncovered


@dataclass(frozen=True)
class Copy:
    """Say where the values of a cell go: a box of the local tensor at place ``target`` of the plan's list."""

    target: int
    destination: Box


@dataclass(frozen=True)
class Cell:
    """Hold a box of a stored piece, counted from the piece's own corner, and everywhere that its values go.

    A cell that goes nowhere is read for the checksum of its piece alone.
    """

    box: Box
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class PieceRead:
    """Pair a stored piece with the disjoint cells that this rank reads of it."""

    tensor: StoredTensor
    piece: StoredPiece
    cells: tuple[Cell, ...]

    @property
    def num_bytes(self) -> int:
        """Return how many bytes of the file the cells are."""
        return sum(cell.box.num_elements for cell in self.cells) * dtype_of(self.tensor.dtype).itemsize

    @property
    def is_whole(self) -> bool:
        """Return whether the cells are all of the piece."""
        return sum(cell.box.num_elements for cell in self.cells) == self.piece.box.num_elements


def plan_reads(
    wanted: Sequence[tuple[str, Sequence[Piece]]],
    stored: Mapping[str, StoredTensor],
    ranks: Sequence[Sequence[TensorDescription]] = (),
    rank: int = 0,
    verify: bool = True,
) -> tuple[PieceRead, ...]:
    """Plan what this rank reads to fill the pieces of its local tensors, in the order in which it lies on disk.

    No element is read twice. ``ranks`` holds what every rank wants, this one at place ``rank``; without it this one is
    alone. What any two ranks read of a piece is cut into the same cells, so that they can check its one checksum
    together. With ``verify`` a part of a piece that nobody wants is read by the first rank that wants another part.

    Raises:
        CheckpointError: a wanted box, named with its tensor, is not stored or only in part.
    """
    if not ranks:
        ranks, rank = [[_describe(name, pieces, stored) for name, pieces in wanted]], 0
    places: dict[str, list[tuple[int, Piece]]] = {}
    for target, (name, pieces) in enumerate(wanted):
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        places.setdefault(name, []).extend((target, piece) for piece in pieces)
        _check_covered(stored[name], pieces)
    boxes = _boxes_by_tensor(ranks, set(places))
    reads = []
    for name, own in places.items():
        tensor = stored[name]
        cells = refine([box for held in boxes[name] for box in held])
        for piece in tensor.pieces:
            read = PieceRead(tensor, piece, _own_cells(piece.box, cells, own))
            if not read.cells:
                continue
            if verify and _first_reader(piece.box, boxes[name]) == rank:
                unwanted = [Cell(box.relative_to(piece.box.offset), ()) for box in uncovered(piece.box, cells)]
                read = PieceRead(tensor, piece, (*read.cells, *unwanted))
            reads.append(read)
    return tuple(sorted(reads, key=lambda read: (read.piece.file, read.piece.start)))


def refine(boxes: Iterable[Box]) -> list[Box]:
    """Cut boxes into disjoint cells so that each box is a union of cells."""
    cells: list[Box] = []
    for box in dict.fromkeys(boxes):
        rest = [box] if box.num_elements else []
        refined = []
        for cell in cells:
            common = cell.intersect(box)
            if common is None:
                refined.append(cell)
                continue
            refined += [common, *subtract(cell, box)]
            rest = [part for remaining in rest for part in subtract(remaining, cell)]
        cells = refined + rest
    return cells


def _describe(name: str, pieces: Sequence[Piece], stored: Mapping[str, StoredTensor]) -> TensorDescription:
    tensor = stored.get(name)
    shape, dtype = ((), "") if tensor is None else (tensor.global_shape, tensor.dtype)
    return TensorDescription(name, shape, dtype, tuple(piece.global_box for piece in pieces))


def _boxes_by_tensor(ranks: Sequence[Sequence[TensorDescription]], names: set[str]) -> dict[str, list[list[Box]]]:
    """Return, for each of the tensors, the boxes that each rank wants of it."""
    boxes: dict[str, list[list[Box]]] = {name: [[] for _ in ranks] for name in names}
    for number, descriptions in enumerate(ranks):
        for description in descriptions:
            if description.name in names:
                boxes[description.name][number].extend(description.boxes)
    return boxes


def _check_covered(tensor: StoredTensor, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        gaps = uncovered(piece.global_box, [stored.box for stored in tensor.pieces])
        if gaps:
            raise CheckpointError(f"the checkpoint lacks {tensor.name}{describe_box(gaps[0])}")


def _own_cells(stored_box: Box, cells: Sequence[Box], own: Sequence[tuple[int, Piece]]) -> tuple[Cell, ...]:
    """Return the cells within a stored box that this rank wants, each with its places."""
    found = []
    for cell in cells:
        common = cell.intersect(stored_box)
        if common is None:
            continue
        copies = tuple(
            Copy(target, piece.localized(common)) for target, piece in own if piece.global_box.intersect(cell) == cell
        )
        if copies:
            found.append(Cell(common.relative_to(stored_box.offset), copies))
    return tuple(sorted(found, key=lambda cell: cell.box.offset))


def _first_reader(stored_box: Box, boxes: Sequence[Sequence[Box]]) -> int | None:
    for number, held in enumerate(boxes):
        if any(box.intersect(stored_box) is not None for box in held):
            return number
    return None
