"""The plan of a save: which rank writes which box, agreed on once and kept while nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.collectives import all_gather_objects, any_rank, run_on_all_ranks
from megatron.core.dist_checkpointing.mapping import ShardedTensor, TensorDescription, dtype_of
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState, gather_from_world
from megatron.core.sharding import Box, describe_box, split_box, uncovered

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
