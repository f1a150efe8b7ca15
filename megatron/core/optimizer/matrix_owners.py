"""Whole matrices of a sharded model, each on one rank at a time: what a rank has of them goes to their owners and back.

An update rule that needs a whole matrix (Muon) is computed once for each matrix, by its owner, and not on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.collectives import all_gather_objects, all_to_all_rows
from megatron.core.distributed.flat_parameters import ParamPart
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Piece, spec_of

_Range = tuple[int, int, int]
"""The number of a local matrix, and where in it a stretch begins and ends."""
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


class MatrixOwners:
    """Say which rank computes with which whole matrix, where these lie in pieces on the ranks of two groups.

    ``parameters`` are this rank's local tensors, the same ones in the same order on all ranks of ``dp``; several may be
    parts of one matrix, and experts have one for each of theirs. Ranks of ``model`` have parts of the same matrices, or
    other experts' matrices. ``parts`` are what this rank has of the parameters: all of each, or with ``is_sharded``
    stretches, which on the ranks of ``dp`` together are the whole. Owners are chosen among the ranks that have a part,
    so that the work, about rows · columns · the smaller of them, is spread evenly over these.

    Matrices are worked on in ``rounds``, so that few are whole at a time. In each an owner has ``round_bytes`` of them
    at most, or one that is larger; where all ranks of ``dp`` hold all parts, these owners share ``round_bytes``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        parts: Sequence[ParamPart],
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
        shapes: dict[str, tuple[int, ...]] = {}
        for each in all_gather_objects({matrix.spec.name: matrix.spec.global_shape for matrix in local}, model):
            shapes |= each
        owner = _choose_owners(shapes, held_by_ranks, dp.size)
        if not local:
            self.rounds: tuple[MatrixRound, ...] = ()
            return
        # Not of the values that are exchanged: a rank that has none receives those of others.
        first = local[0].parameter
        empty = torch.empty(0, dtype=arithmetic_dtype(first.dtype), device=first.device)
        shared_by = 1 if is_sharded else dp.size
        round_of = _choose_rounds(shapes, owner, round_bytes // shared_by // empty.itemsize)
        rounds = []
        for number in range(max(round_of.values()) + 1):
            chosen = {index: matrix for index, matrix in enumerate(local) if round_of[matrix.spec.name] == number}
            rounds.append(
                MatrixRound(
                    chosen,
                    [stretch for stretch, (index, _, _) in mine if index in chosen],
                    [[each for each in ranges if each[0] in chosen] for ranges in ranges_of_ranks],
                    held_by_ranks,
                    {matrix.spec.name: owner[matrix.spec.name] for matrix in chosen.values()},
                    model,
                    dp,
                    empty,
                    is_sharded=is_sharded,
                )
            )
        self.rounds = tuple(rounds)


class MatrixRound:
    """Compute with some of the whole matrices of a `MatrixOwners`, which makes these.

    ``stretches`` are those of the matrices in this rank's parts.
    """

    def __init__(
        self,
        local: Mapping[int, _LocalMatrix],
        stretches: Sequence[Stretch],
        ranges_of_ranks: Sequence[Sequence[_Range]],
        held: Sequence[Mapping[str, Sequence[_Held]]],
        owner: Mapping[str, tuple[int, int]],
        model: Group,
        dp: Group,
        empty: torch.Tensor,
        *,
        is_sharded: bool,
    ) -> None:
        self.stretches = tuple(stretches)
        self._local, self._ranges, self._held, self._owner = local, ranges_of_ranks, held, owner
        self._model, self._dp, self._empty, self._is_sharded = model, dp, empty, is_sharded
        self._names: dict[str, list[int]] = {}
        for index, matrix in local.items():
            self._names.setdefault(matrix.spec.name, []).append(index)
        owned = [{i for n in self._names_of(dp_rank=d) for i in self._names[n]} for d in range(dp.size)]
        self._own = owned[dp.rank]
        # Of this rank's stretches the numbers of those that each rank owns.
        mine = ranges_of_ranks[dp.rank]
        self._parts_of = [[n for n, (index, _, _) in enumerate(mine) if index in at] for at in owned]

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

    def _names_of(self, dp_rank: int, model_rank: int | None = None) -> list[str]:
        return [
            name
            for name in self._names
            if self._owner[name][0] == dp_rank and (model_rank is None or self._owner[name][1] == model_rank)
        ]

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
        d, t, empty = self._dp.rank, self._model.rank, self._empty
        by_owner = [self._names_of(d, rank) for rank in range(self._model.size)]
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
        buffer = _exchange(sent, [sum(_sizes(pieces)) for pieces in arriving], self._model, empty)
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
        lengths = [sum(_sizes(self._pieces(t, names))) for names in by_owner]
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


def _choose_owners(
    shapes: Mapping[str, tuple[int, ...]], held: Sequence[Mapping[str, object]], dp_size: int
) -> dict[str, tuple[int, int]]:
    """Return the ranks within ``dp`` and ``model`` of each matrix's owner: the largest first, to who has least.

    ``held`` has the names of the matrices of which each rank of ``model`` has a part.
    """
    work = {name: shape[0] * shape[1] * min(shape) for name, shape in shapes.items()}
    loads = {(d, t): 0 for d in range(dp_size) for t in range(len(held))}
    owner: dict[str, tuple[int, int]] = {}
    for name in sorted(work, key=lambda name: (-work[name], name)):
        places = [(d, t) for d, t in loads if name in held[t]]
        # Of equal ones the first in this order: neighbours in the model go to different data-parallel ranks.
        owner[name] = min(places, key=lambda place: (loads[place], place[1], place[0]))
        loads[owner[name]] += work[name]
    return owner


def _choose_rounds(
    shapes: Mapping[str, tuple[int, ...]], owner: Mapping[str, tuple[int, int]], most_elements: int
) -> dict[str, int]:
    """Return the number of each matrix's round: every owner works through its own, the largest first.

    Owners were chosen in the same order, so that those of a round are of about one size.
    """
    now: dict[tuple[int, int], tuple[int, int]] = {}
    found: dict[str, int] = {}
    for name, place in owner.items():
        number, taken = now.get(place, (0, 0))
        size = shapes[name][0] * shapes[name][1]
        if taken and taken + size > most_elements:
            number, taken = number + 1, 0
        now[place] = (number, taken + size)
        found[name] = number
    return found


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


def _sizes(pieces: Sequence[tuple[str, Piece]]) -> list[int]:
    return [piece.global_box.num_elements for _, piece in pieces]


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]], received: Sequence[int], group: Group, empty: torch.Tensor
) -> torch.Tensor:
    """Give each rank of the group the tensors of its list, and return the elements that all ranks have sent here."""
    flat = [tensor for tensors in sent for tensor in tensors]
    buffer = torch.cat(flat) if flat else empty
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    return all_to_all_rows(buffer, counts, received, group)[0]
