"""Plan saves and loads: which rank writes which box, and which parts of stored pieces each rank reads.

A save plan is agreed on once and kept while nothing changes. Load plans split the stored pieces into the same cells
on all ranks. They are pure functions of boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.collectives import all_gather_objects, any_rank, run_on_all_ranks
from megatron.core.dist_checkpointing.index import StoredPiece, StoredTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensor, TensorDescription, dtype_of
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState, gather_from_world
from megatron.core.sharding import Box, Piece, describe_box, split_box, subtract, uncovered

MAX_PIECE_BYTES = 64 * 1024 * 1024
"""Larger boxes are cut along dim 0: it bounds the memory of reading and writing, and evens out the writers."""


@dataclass(frozen=True)
class SavePlan:
    """Hold what this rank has described and what of it the rank writes.

    ``own`` lists the boxes that this rank writes in the order of its file, wide types first. ``ranks`` holds the
    ``own`` of every rank of the world on its first rank, and nothing elsewhere.
    """

    held: tuple[TensorDescription, ...]
    own: tuple[TensorDescription, ...]
    ranks: tuple[tuple[TensorDescription, ...], ...]


class SavePlanner:
    """Plan the saves of one run; collective.

    A plan is made among the ranks that can hold equal boxes, those of one model-parallel place, and checked by the
    first rank of the world. Later saves keep it after one reduction that finds no rank's descriptions changed.
    """

    def __init__(self, state: ParallelState, max_piece_bytes: int = MAX_PIECE_BYTES) -> None:
        self._state = state
        self._max_piece_bytes = max_piece_bytes
        self._plan: SavePlan | None = None

    def plan(self, tensors: Sequence[ShardedTensor]) -> SavePlan:
        """Return who writes what of the tensors.

        Raises:
            CheckpointError: the tensors leave a gap, or ranks disagree on one. On every rank alike.
        """
        held = tuple(tensor.describe() for tensor in tensors)
        if self._plan is None or any_rank(held != self._plan.held, self._state.world):
            self._plan = self._agree(held)
        return self._plan

    def _agree(self, held: tuple[TensorDescription, ...]) -> SavePlan:
        state = self._state
        # Ranks that can hold equal boxes: the data-parallel replicas and, of experts, those that hold the same.
        kinds = [(state.dp_cp, tuple(each for each in held if not each.is_expert))]
        if any(each.is_expert for each in held):
            kinds.append((state.expert_dp, tuple(each for each in held if each.is_expert)))
        everybody = [(group, all_gather_objects(of_kind, group)) for group, of_kind in kinds]

        def assign() -> tuple[TensorDescription, ...]:
            own = [plan_writes(all_held, g.ranks, self._max_piece_bytes)[g.rank] for g, all_held in everybody]
            together = (description for of_kind in own for description in of_kind)
            return own[0] if len(own) == 1 else tuple(sorted(together, key=_file_order))

        own = run_on_all_ranks(assign, state.world)
        ranks = tuple(gather_from_world(own, state))
        run_on_all_ranks(lambda: check_writes(ranks), state.world)
        return SavePlan(held, own, ranks)


def plan_writes(
    descriptions: Sequence[Sequence[TensorDescription]],
    ranks: Sequence[int],
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> list[tuple[TensorDescription, ...]]:
    """Decide which of several ranks writes which box; each computes the same plan from all their descriptions.

    ``descriptions[i]`` lists what ``ranks[i]`` holds. Copies that are not owners write nothing. Of the ranks that own
    an equal box (data- and context-parallel replicas) the one with the fewest bytes so far writes it, large boxes
    first. The first rank also lists the tensors that it writes nothing of.

    Raises:
        CheckpointError: ranks disagree on a shape or dtype.
    """
    tensors: dict[str, TensorDescription] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for place, held in enumerate(descriptions):
        for description in held:
            _check_alike(tensors.setdefault(description.name, description), description, ranks[place])
            owned = [box for box in description.boxes if description.is_owner and box.num_elements]
            for box in owned:
                for part in split_box(box, dtype_of(description.dtype).itemsize, max_piece_bytes):
                    places = holders.setdefault((description.name, part), [])
                    if place not in places:
                        places.append(place)
    sized = [(box.num_elements * dtype_of(tensors[name].dtype).itemsize, name, box) for name, box in holders]
    sized.sort(key=lambda item: (-item[0], item[1], item[2].offset))
    assigned_bytes = [0] * len(descriptions)
    writes: list[dict[str, list[Box]]] = [{} for _ in descriptions]
    writes[0].update((name, []) for name in tensors)
    for num_bytes, name, box in sized:
        place = min(holders[name, box], key=lambda p: (assigned_bytes[p], p))
        assigned_bytes[place] += num_bytes
        writes[place].setdefault(name, []).append(box)
    return [_in_file_order(tensors, boxes) for boxes in writes]


def check_writes(ranks: Sequence[Sequence[TensorDescription]]) -> None:
    """Check that what all ranks write makes up every tensor; ``ranks[r]`` is what rank ``r`` writes.

    Raises:
        CheckpointError: ranks disagree on a shape or dtype, or there is a gap or an overlap in a tensor.
    """
    tensors: dict[str, TensorDescription] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, own in enumerate(ranks):
        for description in own:
            _check_alike(tensors.setdefault(description.name, description), description, rank)
            boxes.setdefault(description.name, []).extend(description.boxes)
    for name, description in tensors.items():
        whole = Box((0,) * len(description.global_shape), description.global_shape)
        # In the order of their offsets boxes leave little over at a time.
        gaps = uncovered(whole, sorted(boxes[name], key=lambda box: box.offset))
        if gaps:
            raise CheckpointError(f"no rank holds {name}{describe_box(gaps[0])}; nothing was saved")
        if sum(box.num_elements for box in boxes[name]) != whole.num_elements:
            raise CheckpointError(f"ranks that are no replicas of each other own the same part of {name}")


def _check_alike(first: TensorDescription, other: TensorDescription, rank: int) -> None:
    if (first.global_shape, first.dtype) != (other.global_shape, other.dtype):
        raise CheckpointError(
            f"ranks disagree on {first.name}: {first.dtype} {list(first.global_shape)} and, on rank {rank}, "
            f"{other.dtype} {list(other.global_shape)}"
        )


def _in_file_order(tensors: dict[str, TensorDescription], boxes: dict[str, list[Box]]) -> tuple[TensorDescription, ...]:
    own = [
        replace(tensors[name], boxes=tuple(sorted(boxes[name], key=lambda box: box.offset)), is_owner=True)
        for name in sorted(boxes)
    ]
    return tuple(sorted(own, key=_file_order))


def _file_order(description: TensorDescription) -> tuple[int, str]:
    return -dtype_of(description.dtype).itemsize, description.name


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
