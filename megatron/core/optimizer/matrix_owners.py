"""Whole matrices of a sharded model, each on one rank at a time: what a rank has of them goes to their owners and back.

An update rule that needs a whole matrix (Muon) is computed once for each matrix, by its owner, and not on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_objects, all_to_all_rows
from megatron.core.distributed.flat_parameters import ParamPart
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import Piece, spec_of

Compute = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
"""Return a matrix of the same shape from a matrix and its ``fused_rows``."""


@dataclass(frozen=True)
class _Held:
    """Hold what a tensor-parallel rank has of a matrix: pieces of a local tensor, and whether it is who sends them."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_sender: bool


class MatrixOwners:
    """Compute with whole matrices that lie in pieces on the ranks of two groups.

    ``parameters`` are this rank's local tensors, the same ones in the same order on all ranks of ``dp``, and of the
    same matrices on all ranks of ``tp``; several may be parts of one matrix. ``parts`` are what this rank has of them:
    all of each, or with ``is_sharded`` stretches, which on the ranks of ``dp`` together are the whole. Owners are
    chosen so that the work, about rows · columns · the smaller of them, is spread evenly over the ranks of both groups.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        parts: Sequence[ParamPart],
        tp: Group,
        dp: Group,
        *,
        is_sharded: bool,
    ) -> None:
        self._tp, self._dp, self._is_sharded = tp, dp, is_sharded
        self._parameters = tuple(parameters)
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        mine = [(index_of[id(part.parameter)], part.start, part.end) for part in parts]
        self._ranges = all_gather_objects(mine, dp) if is_sharded else [mine] * dp.size
        held: dict[str, list[tuple[int, _Held]]] = {}
        for index, parameter in enumerate(parameters):
            spec = spec_of(parameter)
            held.setdefault(spec.name, []).append(
                (index, _Held(tuple(parameter.shape), spec.pieces, spec.is_owner and bool(spec.pieces)))
            )
        self._names = {name: tuple(index for index, _ in locals_) for name, locals_ in held.items()}
        self._held: list[Mapping[str, list[_Held]]] = all_gather_objects(
            {name: [each for _, each in locals_] for name, locals_ in held.items()}, tp
        )
        self._owner = self._choose_owners()
        owned = [{i for n in self._names_of(dp_rank=d) for i in self._names[n]} for d in range(dp.size)]
        self._own = owned[dp.rank]
        # Of this rank's parts the numbers of those that each rank owns.
        self._parts_of = [[n for n, (index, _, _) in enumerate(mine) if index in at] for at in owned]

    def compute(self, values: Sequence[torch.Tensor], function: Compute) -> list[torch.Tensor]:
        """Return for each part of this rank its elements of what the function makes of the whole matrices.

        Collective over both groups. Elements outside every piece come back as zero.

        Shapes: ``values``: one ``[part.end - part.start]`` for each part, in their dtype of arithmetic.
        """
        if not self._parameters:
            return []
        # Not of the values: a rank that has none receives those of others.
        dtype = arithmetic_dtype(self._parameters[0].dtype)
        empty = torch.empty(0, dtype=dtype, device=self._parameters[0].device)
        whole = self._to_whole_parameters(values, empty)
        whole = self._through_matrices(whole, function, empty)
        return self._back_to_parts(whole, empty)

    def _choose_owners(self) -> dict[str, tuple[int, int]]:
        """Return the ranks within ``dp`` and ``tp`` of each matrix's owner: the largest first, to who has least."""
        shapes = {name: spec_of(self._parameters[indices[0]]).global_shape for name, indices in self._names.items()}
        work = {name: shape[0] * shape[1] * min(shape) for name, shape in shapes.items()}
        loads = {(d, t): 0 for d in range(self._dp.size) for t in range(self._tp.size)}
        owner: dict[str, tuple[int, int]] = {}
        for name in sorted(work, key=lambda name: (-work[name], name)):
            # Of equal ones the first in this order: neighbours in the model go to different data-parallel ranks.
            place = min(loads, key=lambda place: (loads[place], place[1], place[0]))
            owner[name] = place
            loads[place] += work[name]
        return owner

    def _names_of(self, dp_rank: int, tp_rank: int | None = None) -> list[str]:
        return [
            name
            for name in self._names
            if self._owner[name][0] == dp_rank and (tp_rank is None or self._owner[name][1] == tp_rank)
        ]

    def _to_whole_parameters(self, values: Sequence[torch.Tensor], empty: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the flat local tensors of the matrices that this data-parallel rank owns."""
        whole = {index: empty.new_zeros(self._parameters[index].numel()) for index in self._own}
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
        """Send pieces to the tensor-parallel owners, let these compute, and take back what is this rank's."""
        d, t = self._dp.rank, self._tp.rank
        by_owner = [self._names_of(d, rank) for rank in range(self._tp.size)]
        local = {index: flat.view(self._parameters[index].shape) for index, flat in whole.items()}
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
        arriving = [self._pieces(rank, own, senders_only=True) for rank in range(self._tp.size)]
        buffer = _exchange(sent, [sum(_sizes(pieces)) for pieces in arriving], self._tp, empty)
        matrices = {name: empty.new_zeros(spec_of(self._parameters[self._names[name][0]]).global_shape) for name in own}
        position = 0
        for pieces in arriving:
            for name, piece in pieces:
                count = piece.global_box.num_elements
                matrices[name][piece.global_box.slices] = buffer[position : position + count].view(
                    piece.global_box.shape
                )
                position += count
        for name in own:
            fused_rows = spec_of(self._parameters[self._names[name][0]]).fused_rows
            matrices[name] = function(matrices[name], fused_rows)
        returned = [
            [matrices[name][piece.global_box.slices].reshape(-1) for name, piece in self._pieces(rank, own)]
            for rank in range(self._tp.size)
        ]
        lengths = [sum(_sizes(self._pieces(t, names))) for names in by_owner]
        buffer = _exchange(returned, lengths, self._tp, empty)
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

    def _pieces(self, tp_rank: int, names: Sequence[str], *, senders_only: bool = False) -> list[tuple[str, Piece]]:
        return [
            (name, piece)
            for name in names
            for held in self._held[tp_rank][name]
            if held.is_sender or not senders_only
            for piece in held.pieces
        ]

    def _back_to_parts(self, whole: dict[int, torch.Tensor], empty: torch.Tensor) -> list[torch.Tensor]:
        """Give every data-parallel rank its stretches of what this one owns, and return this rank's parts."""
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
