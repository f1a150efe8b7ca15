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


class MatrixOwners:
    """Compute with whole matrices that lie in pieces on the ranks of two groups.

    ``parameters`` are this rank's local tensors, the same ones in the same order on all ranks of ``dp``; several may be
    parts of one matrix, and experts have one for each of theirs. Ranks of ``model`` have parts of the same matrices, or
    other experts' matrices. ``parts`` are what this rank has of the parameters: all of each, or with ``is_sharded``
    stretches, which on the ranks of ``dp`` together are the whole. Owners are chosen among the ranks that have a part,
    so that the work, about rows · columns · the smaller of them, is spread evenly over these.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        parts: Sequence[ParamPart],
        model: Group,
        dp: Group,
        *,
        is_sharded: bool,
    ) -> None:
        self._model, self._dp, self._is_sharded = model, dp, is_sharded
        self._local = [matrix for parameter in parameters for matrix in _local_matrices(parameter)]
        # Of each part of this rank the stretches of matrices: its number, and where in it they begin and end.
        self._stretches: list[tuple[int, int, int]] = []
        mine = []
        of_parameter: dict[int, list[tuple[int, _LocalMatrix]]] = {}
        for index, matrix in enumerate(self._local):
            of_parameter.setdefault(id(matrix.parameter), []).append((index, matrix))
        for number, part in enumerate(parts):
            for index, matrix in of_parameter[id(part.parameter)]:
                start = max(part.start, matrix.start)
                end = min(part.end, matrix.start + matrix.num_elements)
                if start < end:
                    self._stretches.append((number, start - part.start, end - part.start))
                    mine.append((index, start - matrix.start, end - matrix.start))
        self._ranges = all_gather_objects(mine, dp) if is_sharded else [mine] * dp.size
        held: dict[str, list[tuple[int, _Held]]] = {}
        for index, matrix in enumerate(self._local):
            spec = matrix.spec
            held.setdefault(spec.name, []).append(
                (index, _Held(matrix.shape, spec.pieces, spec.is_owner and bool(spec.pieces)))
            )
        self._names = {name: tuple(index for index, _ in locals_) for name, locals_ in held.items()}
        self._held: list[Mapping[str, list[_Held]]] = all_gather_objects(
            {name: [each for _, each in locals_] for name, locals_ in held.items()}, model
        )
        self._owner = self._choose_owners()
        owned = [{i for n in self._names_of(dp_rank=d) for i in self._names[n]} for d in range(dp.size)]
        self._own = owned[dp.rank]
        # Of this rank's stretches the numbers of those that each rank owns.
        self._parts_of = [[n for n, (index, _, _) in enumerate(mine) if index in at] for at in owned]

    def compute(self, values: Sequence[torch.Tensor], function: Compute) -> list[torch.Tensor]:
        """Return for each part of this rank its elements of what the function makes of the whole matrices.

        Collective over both groups. Elements outside every piece come back as zero.

        Shapes: ``values``: one ``[part.end - part.start]`` for each part, in their dtype of arithmetic.
        """
        if not self._local:
            return []
        # Not of the values: a rank that has none receives those of others.
        first = self._local[0].parameter
        empty = torch.empty(0, dtype=arithmetic_dtype(first.dtype), device=first.device)
        stretches = [values[number][start:end] for number, start, end in self._stretches]
        whole = self._to_whole_matrices(stretches, empty)
        whole = self._through_matrices(whole, function, empty)
        result: list[list[torch.Tensor]] = [[] for _ in values]
        for (number, _, _), stretch in zip(self._stretches, self._back_to_stretches(whole, empty), strict=True):
            result[number].append(stretch)
        return [several[0] if len(several) == 1 else torch.cat(several) for several in result]

    def _choose_owners(self) -> dict[str, tuple[int, int]]:
        """Return the ranks within ``dp`` and ``model`` of each matrix's owner: the largest first, to who has least.

        Only matrices of which this rank has a part are among them, though others are counted.
        """
        shapes = {matrix.spec.name: matrix.spec.global_shape for matrix in self._local}
        of_all: dict[str, tuple[int, ...]] = {}
        for each in all_gather_objects(shapes, self._model):
            of_all |= each
        work = {name: shape[0] * shape[1] * min(shape) for name, shape in of_all.items()}
        loads = {(d, t): 0 for d in range(self._dp.size) for t in range(self._model.size)}
        owner: dict[str, tuple[int, int]] = {}
        for name in sorted(work, key=lambda name: (-work[name], name)):
            places = [(d, t) for d, t in loads if name in self._held[t]]
            # Of equal ones the first in this order: neighbours in the model go to different data-parallel ranks.
            place = min(places, key=lambda place: (loads[place], place[1], place[0]))
            if name in self._names:
                owner[name] = place
            loads[place] += work[name]
        return owner

    def _names_of(self, dp_rank: int, model_rank: int | None = None) -> list[str]:
        return [
            name
            for name in self._names
            if self._owner[name][0] == dp_rank and (model_rank is None or self._owner[name][1] == model_rank)
        ]

    def _to_whole_matrices(self, values: Sequence[torch.Tensor], empty: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the flat local tensors of the matrices that this data-parallel rank owns."""
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

    def _through_matrices(
        self, whole: dict[int, torch.Tensor], function: Compute, empty: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Send pieces to the owners within the model, let these compute, and take back what is this rank's."""
        d, t = self._dp.rank, self._model.rank
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
        for name, spec in specs.items():
            matrices[name] = function(matrices[name], spec.fused_rows)
        returned = [
            [matrices[name][piece.global_box.slices].reshape(-1) for name, piece in self._pieces(rank, own)]
            for rank in range(self._model.size)
        ]
        lengths = [sum(_sizes(self._pieces(t, names))) for names in by_owner]
        buffer = _exchange(returned, lengths, self._model, empty)
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
        return whole

    def _pieces(self, rank: int, names: Sequence[str], *, senders_only: bool = False) -> list[tuple[str, Piece]]:
        return [
            (name, piece)
            for name in names
            for held in self._held[rank].get(name, ())
            if held.is_sender or not senders_only
            for piece in held.pieces
        ]

    def _back_to_stretches(self, whole: dict[int, torch.Tensor], empty: torch.Tensor) -> list[torch.Tensor]:
        """Give every data-parallel rank its stretches of what this one owns, and return this rank's."""
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
