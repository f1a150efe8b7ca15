"""Whole matrices for Muon: ranks send their shards of a matrix to its owner, which updates it and sends shards back.

An update rule that needs whole matrices is thus computed once per matrix instead of once per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import chain
from typing import NamedTuple, TypeVar

import torch

from megatron.core.collectives import all_gather_objects, all_to_all_rows
from megatron.core.distributed import ParamShard
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Shard, spec_of

Item = TypeVar("Item")
Compute = Callable[[torch.Tensor, ParamSpec], torch.Tensor]
"""Returns a matrix of the same shape, given a matrix and its specification."""
BATCH_BYTES = 2**26
"""Size of a batch of matrices, in bytes per owner."""


class RankCoordinates(NamedTuple):
    """A rank's index in the data-parallel group, and in the group over which the model is sharded."""

    dp: int
    model: int


@dataclass(frozen=True)
class ShardRange:
    """The elements ``[start, end)`` of one of this rank's parameter shards, all of one matrix."""

    shard: int
    start: int
    end: int


@dataclass(frozen=True)
class MatrixRange:
    """The elements ``[start, end)`` of a flattened local matrix."""

    matrix: int
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class LocalMatrix:
    """This rank's part of one matrix: a whole local tensor, or one expert's part of a local tensor.

    ``start`` is the offset of the matrix in the elements of ``parameter``, and ``spec`` describes the matrix.
    """

    parameter: torch.nn.Parameter
    start: int
    shape: tuple[int, ...]
    spec: ParamSpec

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class MatrixShard:
    """Shard of a matrix on a model-parallel rank; of several equal copies, only one ``is_sender``."""

    matrix: int
    shard: Shard
    is_sender: bool

    @property
    def num_elements(self) -> int:
        return self.shard.global_box.num_elements


@dataclass(frozen=True)
class _Layout:
    """Shards and owners of the matrices, shared by all batches of an exchange.

    ``shards`` has, for each model-parallel rank, its shards by name of the matrix. ``empty`` is an empty tensor with
    the dtype and the device of all exchanged data.
    """

    matrices: Sequence[LocalMatrix]
    shards: Sequence[Mapping[str, Sequence[MatrixShard]]]
    owners: Mapping[str, RankCoordinates]
    model: Group
    dp: Group
    is_sharded: bool
    empty: torch.Tensor

    def owner_of(self, index: int) -> RankCoordinates:
        return self.owners[self.matrices[index].spec.name]


class MuonShardExchange:
    """Assign an owner to each matrix, and divide the matrices into ``batches`` that are exchanged together.

    ``parameters`` are this rank's local tensors, the same ones in the same order on all ranks of ``dp``. Several may be
    shards of one matrix, and each expert has its own matrix. Ranks of ``model`` have shards of the same matrices, or
    matrices of other experts. ``shards`` are this rank's elements of the parameters: all elements, or, with
    ``is_sharded``, shards that together cover the parameters over the ranks of ``dp``. The owner of a matrix is one of
    the ranks that have a shard of it, chosen so that the work, about rows · columns · min(rows, columns), is balanced.

    Batches limit the memory for whole matrices. In each batch an owner has at most ``batch_bytes`` of matrices, or one
    larger matrix. A rank has at most ``batch_bytes`` of a batch's shards, or as much as the largest matrix. If all
    ranks of ``dp`` hold all elements, ``batch_bytes`` is divided among the owners, but each has at least one matrix.

    Construction is collective over both groups.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        shards: Sequence[ParamShard],
        model: Group,
        dp: Group,
        *,
        is_sharded: bool,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        matrices = [matrix for parameter in parameters for matrix in _local_matrices(parameter)]
        held = list(_matrix_ranges(matrices, shards))
        own_ranges = [matrix_range for _, matrix_range in held]
        # Ranks that are not sharded all hold the same ranges, so one list suffices.
        ranges = all_gather_objects(own_ranges, dp) if is_sharded else [own_ranges]
        shards = all_gather_objects(_shards_by_name(matrices), model)
        shapes, num_held = _gather_sizes(matrices, ranges if is_sharded else [], model)
        owners = _choose_owners(shapes, _largest_first(shapes, num_held), shards, dp.size)
        self.batches: tuple[ExchangeBatch, ...] = ()
        if not matrices:
            return
        # Taken from the parameter and not from exchanged values, which a rank without shards does not have.
        first = matrices[0].parameter
        empty = torch.empty(0, dtype=arithmetic_dtype(first.dtype), device=first.device)
        layout = _Layout(matrices, shards, owners, model, dp, is_sharded, empty)
        most_elements = batch_bytes // empty.itemsize // (1 if is_sharded else dp.size)
        batch_by_name = _choose_batches(shapes, owners, num_held, most_elements)
        num_batches = max(batch_by_name.values()) + 1
        batch_of = [batch_by_name[matrix.spec.name] for matrix in matrices]
        indices_by_batch = _by_batch(num_batches, ((batch_of[index], index) for index in range(len(matrices))))
        held_by_batch = _by_batch(num_batches, ((batch_of[pair[1].matrix], pair[0]) for pair in held))
        ranges_by_batch = [_by_batch(num_batches, ((batch_of[r.matrix], r) for r in of_rank)) for of_rank in ranges]
        self.batches = tuple(
            ExchangeBatch(
                layout,
                indices_by_batch[number],
                held_by_batch[number],
                [of_rank[number] for of_rank in ranges_by_batch] * (dp.size // len(ranges)),
            )
            for number in range(num_batches)
        )


class ExchangeBatch:
    """Exchange of the shards of some matrices: to the owners, and back after the owners' computation.

    A whole matrix is assembled in two steps. The first exchange, over data-parallel ranks, collects the local matrices
    of all model-parallel ranks on the data-parallel rank of the owner. The second, over model-parallel ranks, sends
    their shards to the owner. The same two exchanges in reverse order return the results.

    ``indices`` are the batch's local matrices. ``shard_ranges`` are the batch's elements of this rank's shards, in the
    order of the shards, and ``ranges`` the same elements by local matrix for each data-parallel rank.
    """

    def __init__(
        self,
        layout: _Layout,
        indices: Sequence[int],
        shard_ranges: Sequence[ShardRange],
        ranges: Sequence[Sequence[MatrixRange]],
    ) -> None:
        self.shard_ranges = tuple(shard_ranges)
        self._layout, self._ranges = layout, ranges
        # For the matrices whose owner is on this data-parallel rank: their descriptions, their names by the owner's
        # model-parallel rank, and the indices of their local matrices.
        self._specs: dict[str, ParamSpec] = {}
        self._owned_names: list[list[str]] = [[] for _ in range(layout.model.size)]
        self._owned_indices: set[int] = set()
        for index in indices:
            spec, owner = layout.matrices[index].spec, layout.owner_of(index)
            if owner.dp != layout.dp.rank:
                continue
            self._owned_indices.add(index)
            if spec.name not in self._specs:
                self._specs[spec.name] = spec
                self._owned_names[owner.model].append(spec.name)
        # The indices of this rank's ranges, by the data-parallel rank that receives them.
        self._sent_ranges: list[list[int]] = [[] for _ in range(layout.dp.size)]
        for number, matrix_range in enumerate(ranges[layout.dp.rank]):
            self._sent_ranges[layout.owner_of(matrix_range.matrix).dp].append(number)

    def compute(self, values: list[torch.Tensor], function: Compute) -> list[torch.Tensor]:
        """Apply a function to the whole matrices, and return the elements of the shard ranges.

        Collective over both groups. Elements outside every shard are returned as zero. ``values`` is cleared, so that
        its memory is free while whole matrices exist.

        Shapes: ``values``: one ``[end - start]`` per shard range, in the arithmetic dtype.
        """
        local = self._gather_shards(values)
        values.clear()
        matrices = self._assemble(local)
        for name in matrices:
            matrices[name] = function(matrices[name], self._specs[name]).contiguous()
        self._scatter(matrices, local)
        del matrices
        return self._return_shards(local)

    def _gather_shards(self, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Exchange shards over data-parallel ranks, and return the local matrices with an owner on this rank.

        Shapes: ``[rows, columns]`` for each local matrix.
        """
        layout = self._layout
        flat = {index: layout.empty.new_zeros(layout.matrices[index].num_elements) for index in self._owned_indices}
        if layout.is_sharded and layout.dp.size > 1:
            sent = [[values[number] for number in numbers] for numbers in self._sent_ranges]
            received = [self._owned_ranges(rank) for rank in range(layout.dp.size)]
            ranges = list(chain.from_iterable(received))
            values = _exchange(sent, _lengths(received), layout.dp, layout.empty)
        else:
            own = zip(self._ranges[layout.dp.rank], values, strict=True)
            owned = [(each, value) for each, value in own if each.matrix in self._owned_indices]
            ranges, values = [each for each, _ in owned], [value for _, value in owned]
        for each, value in zip(ranges, values, strict=True):
            flat[each.matrix][each.start : each.end] = value
        return {index: elements.view(layout.matrices[index].shape) for index, elements in flat.items()}

    def _assemble(self, local: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange shards of local matrices over model-parallel ranks, and return this rank's own matrices."""
        layout = self._layout
        rank, empty = layout.model.rank, layout.empty
        sent = [
            [local[each.matrix][each.shard.local_box.slices].reshape(-1) for _, each in self._senders(rank, names)]
            for names in self._owned_names
        ]
        owned = self._owned_names[rank]
        received = [self._senders(sender, owned) for sender in range(layout.model.size)]
        values = _exchange(sent, _shard_lengths(received), layout.model, empty)
        matrices = {name: empty.new_zeros(self._specs[name].global_shape) for name in owned}
        for (name, each), value in zip(chain.from_iterable(received), values, strict=True):
            matrices[name][each.shard.global_box.slices] = value.view(each.shard.global_box.shape)
        return matrices

    def _scatter(self, matrices: Mapping[str, torch.Tensor], local: Mapping[int, torch.Tensor]) -> None:
        """Exchange shards of whole matrices over model-parallel ranks, and write this rank's to local matrices."""
        layout = self._layout
        rank = layout.model.rank
        sent = [
            [
                matrices[name][each.shard.global_box.slices].reshape(-1)
                for name, each in self._shards_of(receiver, self._owned_names[rank])
            ]
            for receiver in range(layout.model.size)
        ]
        received = [self._shards_of(rank, names) for names in self._owned_names]
        values = _exchange(sent, _shard_lengths(received), layout.model, layout.empty)
        for matrix in local.values():
            matrix.zero_()
        for (_, each), value in zip(chain.from_iterable(received), values, strict=True):
            local[each.matrix][each.shard.local_box.slices] = value.view(each.shard.global_box.shape)

    def _return_shards(self, local: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Exchange shards of local matrices over data-parallel ranks, and return this rank's shards."""
        layout = self._layout
        flat = {index: matrix.view(-1) for index, matrix in local.items()}
        sent = [
            [flat[each.matrix][each.start : each.end] for each in self._owned_ranges(rank)]
            for rank in range(layout.dp.size)
        ]
        own = self._ranges[layout.dp.rank]
        received = [[own[number] for number in numbers] for numbers in self._sent_ranges]
        values = _exchange(sent, _lengths(received), layout.dp, layout.empty)
        result = [layout.empty] * len(own)
        for number, value in zip(chain.from_iterable(self._sent_ranges), values, strict=True):
            result[number] = value
        return result

    def _owned_ranges(self, dp_rank: int) -> list[MatrixRange]:
        """Return the ranges of a data-parallel rank in matrices with an owner on this data-parallel rank."""
        return [each for each in self._ranges[dp_rank] if each.matrix in self._owned_indices]

    def _shards_of(self, model_rank: int, names: Iterable[str]) -> list[tuple[str, MatrixShard]]:
        """Return a model-parallel rank's shards of some matrices, each with the name of its matrix."""
        shards = self._layout.shards[model_rank]
        return [(name, each) for name in names for each in shards.get(name, ())]

    def _senders(self, model_rank: int, names: Iterable[str]) -> list[tuple[str, MatrixShard]]:
        return [(name, each) for name, each in self._shards_of(model_rank, names) if each.is_sender]


def _local_matrices(parameter: torch.nn.Parameter) -> Iterator[LocalMatrix]:
    """Yield the matrices of a local tensor: itself, or one per expert, with the expert's global number."""
    spec = spec_of(parameter)
    if parameter.dim() == 2:
        yield LocalMatrix(parameter, 0, tuple(parameter.shape), spec)
        return
    shape = tuple(parameter.shape[1:])
    for position in range(parameter.shape[0]):
        held = spec.within(Box((position, 0, 0), (1, *shape))).shards
        shards = tuple(
            Shard(Box(shard.global_box.offset[1:], shard.global_box.shape[1:]), shard.local_offset[1:])
            for shard in held
        )
        name = f"{spec.name}.{held[0].global_box.offset[0]}"
        of_expert = replace(spec, name=name, global_shape=spec.global_shape[1:], shards=shards)
        yield LocalMatrix(parameter, position * shape[0] * shape[1], shape, of_expert)


def _matrix_ranges(
    matrices: Sequence[LocalMatrix], shards: Sequence[ParamShard]
) -> Iterator[tuple[ShardRange, MatrixRange]]:
    """Yield the intersections of shards and matrices, as a range of each, in the order of the shards."""
    of_parameter: dict[int, list[int]] = {}
    for index, matrix in enumerate(matrices):
        of_parameter.setdefault(id(matrix.parameter), []).append(index)
    for number, shard in enumerate(shards):
        for index in of_parameter[id(shard.parameter)]:
            offset = matrices[index].start
            start, end = max(shard.start, offset), min(shard.end, offset + matrices[index].num_elements)
            if start < end:
                yield (
                    ShardRange(number, start - shard.start, end - shard.start),
                    MatrixRange(index, start - offset, end - offset),
                )


def _shards_by_name(matrices: Sequence[LocalMatrix]) -> dict[str, list[MatrixShard]]:
    """Return the shards of this rank's local matrices by name of the matrix; a matrix that is only padding has none."""
    by_name: dict[str, list[MatrixShard]] = {}
    for index, matrix in enumerate(matrices):
        shards = [MatrixShard(index, shard, matrix.spec.is_owner) for shard in matrix.spec.shards]
        by_name.setdefault(matrix.spec.name, []).extend(shards)
    return by_name


def _gather_sizes(
    matrices: Sequence[LocalMatrix], ranges: Sequence[Sequence[MatrixRange]], model: Group
) -> tuple[dict[str, tuple[int, ...]], dict[str, dict[RankCoordinates, int]]]:
    """Return every matrix's shape, and its number of elements per rank; collective.

    ``ranges`` has the ranges of each data-parallel rank, or is empty if the ranks are not sharded.
    """
    described = {matrix.spec.name: (matrix.spec.global_shape, Counter[int]()) for matrix in matrices}
    for dp_rank, of_rank in enumerate(ranges):
        for each in of_rank:
            described[matrices[each.matrix].spec.name][1][dp_rank] += each.num_elements
    shapes: dict[str, tuple[int, ...]] = {}
    num_held: dict[str, dict[RankCoordinates, int]] = {}
    for model_rank, of_matrices in enumerate(all_gather_objects(described, model)):
        for name, (shape, counts) in of_matrices.items():
            shapes[name] = shape
            by_rank = num_held.setdefault(name, {})
            by_rank.update({RankCoordinates(dp_rank, model_rank): count for dp_rank, count in counts.items()})
    return shapes, num_held


def _work(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * min(shape)


def _largest_first(
    shapes: Mapping[str, tuple[int, ...]], num_held: Mapping[str, Mapping[RankCoordinates, int]]
) -> list[str]:
    """Return the names of the matrices, most work first; equal matrices alternate between the ranks that hold them.

    ``num_held`` is the number of elements of each matrix per rank. A matrix counts for the rank with most of its
    elements.
    """
    seen = Counter[tuple[int, RankCoordinates]]()
    keys = {}
    # Shorter names first: for names that differ only in a number, this is the numerical order.
    for name in sorted(shapes, key=lambda name: (len(name), name)):
        nobody = (0, RankCoordinates(0, 0))
        (_, holder) = min(((-count, rank) for rank, count in num_held[name].items()), default=nobody)
        work = _work(shapes[name])
        keys[name] = (-work, seen[work, holder], holder)
        seen[work, holder] += 1
    return sorted(keys, key=lambda name: keys[name])


def _choose_owners(
    shapes: Mapping[str, tuple[int, ...]], order: Sequence[str], held: Sequence[Mapping[str, object]], dp_size: int
) -> dict[str, RankCoordinates]:
    """Assign the matrices, in this order, each to the rank with least work among the ranks with a shard of it.

    ``held`` has, for each model-parallel rank, the names of the matrices of which it has a shard.
    """
    # Ties go to the first rank in this order, so neighbors in the model go to different data-parallel ranks.
    loads = [[(0, d) for d in range(dp_size)] for _ in held]
    owners: dict[str, RankCoordinates] = {}
    for name in order:
        (load, t, d) = min((loads[t][0][0], t, loads[t][0][1]) for t, names in enumerate(held) if name in names)
        heapreplace(loads[t], (load + _work(shapes[name]), d))
        owners[name] = RankCoordinates(d, t)
    return owners


def _choose_batches(
    shapes: Mapping[str, tuple[int, ...]],
    owners: Mapping[str, RankCoordinates],
    num_held: Mapping[str, Mapping[RankCoordinates, int]],
    most_elements: int,
) -> dict[str, int]:
    """Assign each matrix to the first batch with space for it, so that owners work at the same time.

    In a batch an owner has at most ``most_elements``, or one matrix, and a rank holds at most ``most_elements``, or as
    much as the largest matrix. Owners were chosen in the same order, so a batch's matrices are of similar size.
    """
    taken: Counter[tuple[int, str, RankCoordinates]] = Counter()
    found: dict[str, int] = {}
    for name, owner in owners.items():
        size = shapes[name][0] * shapes[name][1]
        needed = {("whole", owner): size}
        needed |= {("held", holder): count for holder, count in num_held[name].items()}
        number, most = 0, max(most_elements, size)
        while any((held := taken[(number, *key)]) and held + count > most for key, count in needed.items()):
            number += 1
        for key, count in needed.items():
            taken[(number, *key)] += count
        found[name] = number
    return found


def _by_batch(num_batches: int, numbered: Iterable[tuple[int, Item]]) -> list[list[Item]]:
    """Group items by the number of their batch."""
    lists: list[list[Item]] = [[] for _ in range(num_batches)]
    for number, item in numbered:
        lists[number].append(item)
    return lists


def _lengths(ranges: Sequence[Sequence[MatrixRange]]) -> list[list[int]]:
    return [[each.num_elements for each in of_rank] for of_rank in ranges]


def _shard_lengths(shards: Sequence[Sequence[tuple[str, MatrixShard]]]) -> list[list[int]]:
    return [[each.num_elements for _, each in of_rank] for of_rank in shards]


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[int]], group: Group, empty: torch.Tensor
) -> list[torch.Tensor]:
    """Send each rank of the group its list of flat tensors, and return the tensors received from all ranks.

    ``received`` has the lengths of the tensors that each rank sends to this one.
    """
    flat = [tensor for tensors in sent for tensor in tensors]
    buffer = torch.cat(flat) if flat else empty
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    buffer, _ = all_to_all_rows(buffer, counts, [sum(lengths) for lengths in received], group)
    return list(buffer.split_with_sizes([length for lengths in received for length in lengths]))
