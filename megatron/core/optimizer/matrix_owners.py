"""Whole matrices of a sharded model, each on one rank at a time: what a rank has of them goes to their owners and back.

An update rule that needs a whole matrix (Muon) is computed once for each matrix, by its owner, and not on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Any

import torch

from megatron.core.collectives import all_gather_objects, all_to_all_rows
from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Piece, spec_of

_Range = tuple[int, int, int]
"""The number of a local matrix, and where in it a stretch begins and ends."""
_Place = tuple[int, int]
"""A rank, by its rank within ``dp`` and within ``model``."""
Compute = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""Return a matrix of the same shape from a matrix and its ``fused_rows``."""


@dataclass(frozen=True)
class _Held:
    """Hold what a rank of a model has of a matrix: pieces of a local matrix, and whether it is who sends them."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_sender: bool


@dataclass(frozen=True, eq=False)
class _LocalMatrix:
    """Hold where a matrix begins in a local tensor's elements, its local shape, and what it is of the whole."""

    parameter: torch.nn.Parameter
    start: int
    shape: tuple[int, ...]
    spec: ParamSpec

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Stretch:
    """Hold the number of a part, and where in it a stretch of a matrix begins and ends."""

    part: int
    start: int
    end: int


ROUND_BYTES = 2**26
"""The matrices of a round, in bytes of each owner."""


class MuonShardExchange:
    """Say which rank computes with which whole matrix, where these lie in pieces on the ranks of two groups.

    ``parameters`` are this rank's local tensors, the same ones in the same order on all ranks of ``dp``; several may be
    parts of one matrix, and experts have one for each of theirs. Ranks of ``model`` have parts of the same matrices, or
    other experts' matrices. ``parts`` are what this rank has of the parameters: all of each, or with ``is_sharded``
    stretches, which on the ranks of ``dp`` together are the whole. Owners are chosen among the ranks that have a part,
    so that the work, about rows · columns · the smaller of them, is spread evenly over these.

    Matrices are worked on in ``rounds``, so that few are whole at a time. In each an owner has ``round_bytes`` of them
    at most, or one that is larger. A rank has ``round_bytes`` of their stretches at most, or as much as the largest of
    them. Where all ranks of ``dp`` hold all parts, the owners share ``round_bytes``, but each has one matrix at least.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        parts: Sequence[ParamShard],
        model: Group,
        dp: Group,
        *,
        is_sharded: bool,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        local = [matrix for parameter in parameters for matrix in _local_matrices(parameter)]
        of_parameter: dict[int, list[tuple[int, _LocalMatrix]]] = {}
        for index, matrix in enumerate(local):
            of_parameter.setdefault(id(matrix.parameter), []).append((index, matrix))
        mine: list[tuple[Stretch, _Range]] = []
        for number, part in enumerate(parts):
            for index, matrix in of_parameter[id(part.parameter)]:
                start = max(part.start, matrix.start)
                end = min(part.end, matrix.start + matrix.num_elements)
                if start < end:
                    of_part = Stretch(number, start - part.start, end - part.start)
                    mine.append((of_part, (index, start - matrix.start, end - matrix.start)))
        ranges = [matrix_range for _, matrix_range in mine]
        ranges_of_ranks = all_gather_objects(ranges, dp) if is_sharded else [ranges] * dp.size
        held: dict[str, list[_Held]] = {}
        for matrix in local:
            spec = matrix.spec
            held.setdefault(spec.name, []).append(_Held(matrix.shape, spec.pieces, spec.is_owner and bool(spec.pieces)))
        held_by_ranks = all_gather_objects(held, model)
        names = [matrix.spec.name for matrix in local]
        described = {matrix.spec.name: (matrix.spec.global_shape, Counter[int]()) for matrix in local}
        for d, of_rank in enumerate(ranges_of_ranks if is_sharded else ()):
            for index, start, end in of_rank:
                described[names[index]][1][d] += end - start
        shapes: dict[str, tuple[int, ...]] = {}
        stretches: dict[str, dict[_Place, int]] = {}
        for t, of_matrices in enumerate(all_gather_objects(described, model)):
            for name, (shape, counts) in of_matrices.items():
                shapes[name] = shape
                stretches.setdefault(name, {}).update({(d, t): count for d, count in counts.items()})
        owner = _choose_owners(shapes, _in_order(shapes, stretches), held_by_ranks, dp.size)
        if not local:
            self.rounds: tuple[ExchangeBatch, ...] = ()
            return
        # Not of the values that are exchanged: a rank that has none receives those of others.
        first = local[0].parameter
        empty = torch.empty(0, dtype=arithmetic_dtype(first.dtype), device=first.device)
        most = round_bytes // empty.itemsize // (1 if is_sharded else dp.size)
        round_of = _choose_rounds(shapes, owner, stretches, most)
        num_rounds = max(round_of.values()) + 1
        at = [round_of[name] for name in names]
        local_of = _sorted_into(num_rounds, ((at[index], (index, matrix)) for index, matrix in enumerate(local)))
        mine_of = _sorted_into(num_rounds, ((at[each[0]], stretch) for stretch, each in mine))
        # Ranks that are not sharded have one list, which is sorted once.
        ranges_of = {
            id(of_rank): _sorted_into(num_rounds, ((at[each[0]], each) for each in of_rank))
            for of_rank in (ranges_of_ranks if is_sharded else [ranges])
        }
        self.rounds = tuple(
            ExchangeBatch(
                dict(local_of[number]),
                mine_of[number],
                [ranges_of[id(of_rank)][number] for of_rank in ranges_of_ranks],
                held_by_ranks,
                owner,
                model,
                dp,
                empty,
                is_sharded=is_sharded,
            )
            for number in range(num_rounds)
        )


class ExchangeBatch:
    """Compute with some of the whole matrices of a `MuonShardExchange`, which makes these.

    ``stretches`` are those of the matrices in this rank's parts, in the parts' order. ``owner`` may have other rounds'.
    """

    def __init__(
        self,
        local: Mapping[int, _LocalMatrix],
        stretches: Sequence[Stretch],
        ranges_of_ranks: Sequence[Sequence[_Range]],
        held: Sequence[Mapping[str, Sequence[_Held]]],
        owner: Mapping[str, _Place],
        model: Group,
        dp: Group,
        empty: torch.Tensor,
        *,
        is_sharded: bool,
    ) -> None:
        self.stretches = tuple(stretches)
        self._local, self._ranges, self._held = local, ranges_of_ranks, held
        self._model, self._dp, self._empty, self._is_sharded = model, dp, empty, is_sharded
        self._names: dict[str, list[int]] = {}
        for index, matrix in local.items():
            self._names.setdefault(matrix.spec.name, []).append(index)
        # Of the matrices that this data-parallel rank owns: those of each rank of the model, and their local numbers.
        self._owned_names: list[list[str]] = [[] for _ in range(model.size)]
        for name in self._names:
            if owner[name][0] == dp.rank:
                self._owned_names[owner[name][1]].append(name)
        self._own = {index for names in self._owned_names for name in names for index in self._names[name]}
        # Of this rank's stretches the numbers of those that each rank owns.
        self._parts_of: list[list[int]] = [[] for _ in range(dp.size)]
        for number, (index, _, _) in enumerate(ranges_of_ranks[dp.rank]):
            self._parts_of[owner[local[index].spec.name][0]].append(number)

    def compute(self, values: list[torch.Tensor], function: Compute) -> list[torch.Tensor]:
        """Return for each stretch of this rank its elements of what the function makes of the whole matrices.

        Collective over both groups. Elements outside every piece come back as zero. ``values`` is emptied, so that its
        memory is free while matrices are whole.

        Shapes: ``values``: one ``[end - start]`` for each stretch, in their dtype of arithmetic.
        """
        whole = self._to_whole_matrices(values)
        values.clear()
        self._through_matrices(whole, function)
        return self._back_to_stretches(whole)

    def _to_whole_matrices(self, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the flat local tensors of the matrices that this data-parallel rank owns."""
        empty = self._empty
        whole = {index: empty.new_zeros(self._local[index].num_elements) for index in self._own}
        if not self._is_sharded or self._dp.size == 1:
            for (index, start, end), value in zip(self._ranges[self._dp.rank], values, strict=True):
                if index in self._own:
                    whole[index][start:end] = value
            return whole
        sent = [[values[n] for n in numbers] for numbers in self._parts_of]
        received = [[r for r in ranges if r[0] in self._own] for ranges in self._ranges]
        buffer = _exchange(sent, _lengths(received), self._dp, empty)
        position = 0
        for ranges in received:
            for index, start, end in ranges:
                whole[index][start:end] = buffer[position : position + end - start]
                position += end - start
        return whole

    def _through_matrices(self, whole: Mapping[int, torch.Tensor], function: Compute) -> None:
        """Send pieces to the owners within the model, let these compute, and take back what is this rank's."""
        t, empty, by_owner = self._model.rank, self._empty, self._owned_names
        local = {index: flat.view(self._local[index].shape) for index, flat in whole.items()}
        sent = [
            [
                local[index][piece.local_box.slices].reshape(-1)
                for name in names
                for index, held in zip(self._names[name], self._held[t][name], strict=True)
                if held.is_sender
                for piece in held.pieces
            ]
            for names in by_owner
        ]
        own = by_owner[t]
        arriving = [self._pieces(rank, own, senders_only=True) for rank in range(self._model.size)]
        buffer = _exchange(
            sent, [sum(piece.global_box.num_elements for _, piece in pieces) for pieces in arriving], self._model, empty
        )
        specs = {name: self._local[self._names[name][0]].spec for name in own}
        matrices = {name: empty.new_zeros(spec.global_shape) for name, spec in specs.items()}
        position = 0
        for pieces in arriving:
            for name, piece in pieces:
                count = piece.global_box.num_elements
                matrices[name][piece.global_box.slices] = buffer[position : position + count].view(
                    piece.global_box.shape
                )
                position += count
        del buffer, sent
        for name, spec in specs.items():
            matrices[name] = function(matrices[name], spec.fused_rows).contiguous()
        returned = [
            [matrices[name][piece.global_box.slices].reshape(-1) for name, piece in self._pieces(rank, own)]
            for rank in range(self._model.size)
        ]
        lengths = [sum(piece.global_box.num_elements for _, piece in self._pieces(t, names)) for names in by_owner]
        buffer = _exchange(returned, lengths, self._model, empty)
        del returned, matrices
        position = 0
        for names in by_owner:
            for name in names:
                for index, held in zip(self._names[name], self._held[t][name], strict=True):
                    local[index].zero_()
                    for piece in held.pieces:
                        count = piece.global_box.num_elements
                        local[index][piece.local_box.slices] = buffer[position : position + count].view(
                            piece.global_box.shape
                        )
                        position += count

    def _pieces(self, rank: int, names: Sequence[str], *, senders_only: bool = False) -> list[tuple[str, Piece]]:
        return [
            (name, piece)
            for name in names
            for held in self._held[rank].get(name, ())
            if held.is_sender or not senders_only
            for piece in held.pieces
        ]

    def _back_to_stretches(self, whole: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Give every data-parallel rank its stretches of what this one owns, and return this rank's."""
        empty = self._empty
        sent = [[whole[i][start:end] for i, start, end in ranges if i in self._own] for ranges in self._ranges]
        mine = self._ranges[self._dp.rank]
        lengths = _lengths([[mine[n] for n in numbers] for numbers in self._parts_of])
        buffer = _exchange(sent, lengths, self._dp, empty)
        result = [empty] * len(mine)
        position = 0
        for numbers in self._parts_of:
            for n in numbers:
                length = mine[n][2] - mine[n][1]
                result[n] = buffer[position : position + length]
                position += length
        return result


def _work(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * min(shape)


def _in_order(shapes: Mapping[str, tuple[int, ...]], stretches: Mapping[str, Mapping[_Place, int]]) -> list[str]:
    """Return the names of the matrices, the most work first; equal ones of each rank that holds them in turns.

    ``stretches`` say how many elements of a matrix the ranks hold. A matrix counts as that rank's which holds most.
    """
    seen = Counter[tuple[int, _Place]]()
    keys = {}
    # Shorter names first: where only numbers in them differ, that is the order of the numbers.
    for name in sorted(shapes, key=lambda name: (len(name), name)):
        (_, holder) = min(((-count, place) for place, count in stretches[name].items()), default=(0, (0, 0)))
        work = _work(shapes[name])
        keys[name] = (-work, seen[work, holder], holder)
        seen[work, holder] += 1
    return sorted(keys, key=lambda name: keys[name])


def _choose_owners(
    shapes: Mapping[str, tuple[int, ...]], order: Sequence[str], held: Sequence[Mapping[str, object]], dp_size: int
) -> dict[str, _Place]:
    """Return each matrix's owner, chosen in this order: who has least work of the ranks that have a part of it.

    ``held`` has the names of the matrices of which each rank of ``model`` has a part.
    """
    # Of equal ones the first in this order: neighbors in the model go to different data-parallel ranks.
    loads = [[(0, d) for d in range(dp_size)] for _ in held]
    owner: dict[str, _Place] = {}
    for name in order:
        (load, t, d) = min((loads[t][0][0], t, loads[t][0][1]) for t, names in enumerate(held) if name in names)
        heapreplace(loads[t], (load + _work(shapes[name]), d))
        owner[name] = (d, t)
    return owner


def _choose_rounds(
    shapes: Mapping[str, tuple[int, ...]],
    owner: Mapping[str, _Place],
    stretches: Mapping[str, Mapping[_Place, int]],
    most_elements: int,
) -> dict[str, int]:
    """Return the number of each matrix's round: the first with room for it, so that owners work at the same time.

    What an owner has in a round is ``most_elements`` at most, or one matrix, and so are a rank's ``stretches``, or as
    much as the largest matrix. Owners were chosen in the same order, so that a round's matrices are of about one size.
    """
    taken: Counter[tuple[int, str, _Place]] = Counter()
    found: dict[str, int] = {}
    for name, place in owner.items():
        size = shapes[name][0] * shapes[name][1]
        needed = {("whole", place): size}
        needed |= {("stretches", holder): count for holder, count in stretches[name].items()}
        number, most = 0, max(most_elements, size)
        while any((held := taken[(number, *who)]) and held + count > most for who, count in needed.items()):
            number += 1
        for who, count in needed.items():
            taken[(number, *who)] += count
        found[name] = number
    return found


def _sorted_into(num_rounds: int, numbered: Iterable[tuple[int, Any]]) -> list[list[Any]]:
    """Return the list of each round, from what comes with the number of its round."""
    lists: list[list[Any]] = [[] for _ in range(num_rounds)]
    for number, each in numbered:
        lists[number].append(each)
    return lists


def _local_matrices(parameter: torch.nn.Parameter) -> Iterator[_LocalMatrix]:
    """Yield the matrices of a local tensor: itself, or those of its experts, each by its number among all."""
    spec = spec_of(parameter)
    if parameter.dim() == 2:
        yield _LocalMatrix(parameter, 0, tuple(parameter.shape), spec)
        return
    shape = tuple(parameter.shape[1:])
    for place in range(parameter.shape[0]):
        held = spec.within(Box((place, 0, 0), (1, *shape))).pieces
        pieces = tuple(
            Piece(Box(piece.global_box.offset[1:], piece.global_box.shape[1:]), piece.local_offset[1:])
            for piece in held
        )
        name = f"{spec.name}.{held[0].global_box.offset[0]}"
        of_expert = replace(spec, name=name, global_shape=spec.global_shape[1:], pieces=pieces)
        yield _LocalMatrix(parameter, place * shape[0] * shape[1], shape, of_expert)


def _lengths(ranges_of_ranks: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
    return [sum(end - start for _, start, end in ranges) for ranges in ranges_of_ranks]


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]], received: Sequence[int], group: Group, empty: torch.Tensor
) -> torch.Tensor:
    """Give each rank of the group the tensors of its list, and return the elements that all ranks have sent here."""
    flat = [tensor for tensors in sent for tensor in tensors]
    buffer = torch.cat(flat) if flat else empty
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    return all_to_all_rows(buffer, counts, received, group)[0]
