"""Plan saves and loads: the run's sharded tensors by name, the rank that writes each box, and each rank's reads.

A save plan is computed once and reused while nothing changes. Load plans split stored shards into the same cells on all
ranks. Plans are pure functions of boxes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from megatron.core.collectives import all_gather_objects, any_rank, run_on_all_ranks
from megatron.core.dist_checkpointing.index import RNG_PREFIX, CheckpointIndex, StoredShard, StoredTensor
from megatron.core.errors import CheckpointError
from megatron.core.parallel_config import GRID_AXES, Place
from megatron.core.parallel_state import ParallelState, gather_from_world
from megatron.core.sharding import (
    Box,
    ParamSpec,
    QuantizedStorage,
    Shard,
    describe_box,
    full_shards,
    held_of,
    quantized_of,
    spec_of,
    split_box,
    subtract,
    uncovered,
)

_DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class TensorDescription:
    """The boxes of a global tensor that one rank holds, without values, for exchange between ranks.

    ``is_owner`` is False for a copy that another rank of the same model replica saves. ``is_expert`` selects the ranks
    that hold replicas of the boxes (see `ParamSpec`).
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    is_owner: bool = True
    is_expert: bool = False


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """Local tensor, with the boxes of the global tensor that it holds.

    ``name`` is the name in the checkpoint, the same at any layout. Local elements outside every shard are padding,
    which is neither saved nor loaded. With ``quantized`` the data has memory only while it is `opened`, and is then
    quantized.
    """

    name: str
    global_shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    data: torch.Tensor
    is_owner: bool = True
    is_expert: bool = False
    quantized: QuantizedStorage | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Give the data memory inside the context, which must fill it."""
        if self.quantized is None:
            yield
            return
        self.quantized.open()
        try:
            yield
        finally:
            self.quantized.close()

    def describe(self) -> TensorDescription:
        """Return the description without values."""
        return TensorDescription(
            name=self.name,
            global_shape=self.global_shape,
            dtype=dtype_name(self.data.dtype),
            boxes=tuple(shard.global_box for shard in self.shards),
            is_owner=self.is_owner,
            is_expert=self.is_expert,
        )

    def view(self, box: Box) -> torch.Tensor | None:
        """Return the local values of a global box if it is within one shard, otherwise None."""
        for shard in self.shards:
            if shard.global_box.intersect(box) == box:
                return self.data[shard.localized(box).slices]
        return None


def from_spec(spec: ParamSpec, data: torch.Tensor) -> ShardedTensor:
    """Create the sharded tensor of ``data``, with the name and layout of ``spec``."""
    for shard in spec.shards:
        ends = (o + n for o, n in zip(shard.local_offset, shard.global_box.shape, strict=True))
        assert all(end <= size for end, size in zip(ends, data.shape, strict=True)), (
            f"{spec.name}: a shard at {shard.local_offset} of shape {shard.global_box.shape} is outside the "
            f"local tensor of shape {tuple(data.shape)}"
        )
    return ShardedTensor(spec.name, spec.global_shape, spec.shards, data.detach(), spec.is_owner, spec.is_expert)


def whole_tensor(name: str, data: torch.Tensor) -> ShardedTensor:
    """Create a ``ShardedTensor`` whose only shard is the whole tensor."""
    return ShardedTensor(name, tuple(data.shape), full_shards(data.shape), data.detach())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in the index, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in the index.

    Raises:
        KeyError: checkpoints do not support this dtype.
    """
    return {dtype_name(dtype): dtype for dtype in _DTYPES}[name]


def shard_key(name: str, global_shape: Sequence[int], box: Box) -> str:
    """Return the key of a shard in its file: the name, and the slice in brackets unless it is the whole tensor."""
    if box.shape == tuple(global_shape):
        return name
    return name + describe_box(box)


MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
AVERAGE_PREFIX = OPTIMIZER_PREFIX + "ema."
FLOAT8_PREFIX = "float8."


class CheckpointableOptimizer(Protocol):
    """Interface of an optimizer that can be checkpointed."""

    def sharded_state(self) -> dict[str, tuple[ParamSpec, torch.Tensor]]:
        """Return every tensor of the state, creating it if it does not exist yet, under arbitrary unique keys.

        The names in the checkpoint are those of the descriptions, which are independent of the layout and start with
        ``optimizer.``. The tensors are the optimizer's own: loading fills them in place.
        """

    def scalar_state(self) -> dict[str, Any]:
        """Return the rest of the state as plain JSON values."""

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Restore what `scalar_state` returned."""

    def restart_average(self) -> None:
        """Restart the moving average of the weights, if there is one."""


class Float8Scaling(Protocol):
    """Interface of FP8 delayed scaling that can be checkpointed."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors to save, by name; loading fills them in place."""

    def loaded(self) -> None:
        """Notify that the tensors were filled."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """Objects whose tensors a checkpoint saves and loads.

    ``models`` are this rank's model chunks, ``rng`` the state of each named random number stream, and ``float8`` the
    history of FP8 delayed scaling for the whole model, the same on every rank.
    """

    models: Sequence[torch.nn.Module]
    optimizer: CheckpointableOptimizer | None = None
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)
    float8: Float8Scaling | None = None


def model_tensors(models: Sequence[torch.nn.Module], stored: Container[str] = ()) -> list[ShardedTensor]:
    """Describe every parameter of the model chunks; buffers are not part of a checkpoint.

    Quantized parameters have codes and scales. If ``stored``, the names in a checkpoint that is loaded, includes the
    weight itself, it is quantized while it is loaded.
    """
    tensors = []
    for model in models:
        for name, parameter in model.named_parameters():
            assert hasattr(parameter, "spec"), f"parameter {name} carries no spec"
            quantized, whole = quantized_of(parameter), spec_of(parameter).with_prefix(MODEL_PREFIX)
            if quantized is not None and whole.name in stored:
                tensors.append(replace(from_spec(whole, parameter), quantized=quantized))
                continue
            tensors += [from_spec(spec.with_prefix(MODEL_PREFIX), values) for spec, values in held_of(parameter)]
    return tensors


def optimizer_tensors(optimizer: CheckpointableOptimizer) -> list[ShardedTensor]:
    """Describe every tensor of the optimizer's state; several may be shards of one global tensor."""
    tensors = [from_spec(spec, tensor) for spec, tensor in optimizer.sharded_state().values()]
    for tensor in tensors:
        assert tensor.name.startswith(OPTIMIZER_PREFIX), f"{tensor.name} does not begin with {OPTIMIZER_PREFIX}"
    return tensors


def rng_tensors(rng: Mapping[str, torch.Tensor], state: ParallelState) -> list[ShardedTensor]:
    """Describe this rank's random number streams, named by its grid coordinates."""
    return [whole_tensor(rng_name(stream, state.place), tensor) for stream, tensor in sorted(rng.items())]


def float8_tensors(float8: Float8Scaling | None, state: ParallelState) -> list[ShardedTensor]:
    """Describe the history of delayed scaling; the first rank of a model copy owns it."""
    is_owner = state.tp.is_first and state.pp.is_first
    tensors = {} if float8 is None else float8.tensors()
    return [replace(whole_tensor(FLOAT8_PREFIX + name, each), is_owner=is_owner) for name, each in tensors.items()]


def rng_name(stream: str, place: Place) -> str:
    """Return the name of a random number stream of the rank with the given grid coordinates."""
    return RNG_PREFIX + "".join(f"{axis}{place[axis]}." for axis in GRID_AXES) + stream


@dataclass(frozen=True, eq=False)
class AverageChoice:
    """The optimizer tensors to load from a checkpoint, and the namespaces that must be loaded completely.

    ``line`` is a note for the log if the averages restart from the loaded weights.
    """

    tensors: tuple[ShardedTensor, ...]
    namespaces: tuple[str, ...]
    line: str | None = None


def average_choice(tensors: Sequence[ShardedTensor], index: CheckpointIndex) -> AverageChoice:
    """Select the optimizer tensors to load: EMA weights only if both the run and the checkpoint have them."""
    is_wanted = any(tensor.name.startswith(AVERAGE_PREFIX) for tensor in tensors)
    is_stored = any(name.startswith(AVERAGE_PREFIX) for name in index.tensors)
    if is_wanted == is_stored:
        return AverageChoice(tuple(tensors), (OPTIMIZER_PREFIX,))
    if is_wanted:
        others = tuple(tensor for tensor in tensors if not tensor.name.startswith(AVERAGE_PREFIX))
        line = (
            "--ema-decay: the average starts from the loaded weights, because the checkpoint contains no averaged "
            "weights"
        )
        return AverageChoice(others, (OPTIMIZER_PREFIX,), line)
    kinds = {name.split(".")[1] for name in index.tensors if name.startswith(OPTIMIZER_PREFIX)}
    namespaces = sorted(f"{OPTIMIZER_PREFIX}{kind}." for kind in kinds)
    return AverageChoice(tuple(tensors), tuple(name for name in namespaces if name != AVERAGE_PREFIX))


MAX_SHARD_BYTES = 64 * 1024 * 1024
"""Larger boxes are split along dim 0, which bounds the memory of reads and writes and balances the writers."""


@dataclass(frozen=True)
class SavePlan:
    """The tensors that this rank holds, and the boxes that it writes.

    ``own`` lists the boxes that this rank writes in the order of its file, widest dtypes first. ``ranks`` has the
    ``own`` of every rank on the first rank of the world, and is empty elsewhere.
    """

    held: tuple[TensorDescription, ...]
    own: tuple[TensorDescription, ...]
    ranks: tuple[tuple[TensorDescription, ...], ...]


class SavePlanner:
    """Planner of the saves of one run; collective.

    Ranks that can hold equal boxes, those with the same model-parallel coordinates, agree on a plan, and the first rank
    of the world checks it. Later saves reuse it after one all-reduce confirms that no rank's descriptions have changed.
    """

    def __init__(self, state: ParallelState, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._state = state
        self._max_shard_bytes = max_shard_bytes
        self._plan: SavePlan | None = None

    def plan(self, tensors: Sequence[ShardedTensor]) -> SavePlan:
        """Return the plan that assigns the writes of the tensors to ranks.

        Raises:
            CheckpointError: the tensors leave a gap, or ranks disagree on a tensor. All ranks raise.
        """
        held = tuple(tensor.describe() for tensor in tensors)
        if self._plan is None or any_rank(held != self._plan.held, self._state.world):
            self._plan = self._agree(held)
        return self._plan

    def _agree(self, held: tuple[TensorDescription, ...]) -> SavePlan:
        state = self._state
        # Ranks that can hold equal boxes: the data-parallel replicas and, for experts, the ranks with the same experts.
        kinds = [(state.dp_cp, tuple(each for each in held if not each.is_expert))]
        if any(each.is_expert for each in held):
            kinds.append((state.expert_dp, tuple(each for each in held if each.is_expert)))
        everybody = [(group, all_gather_objects(of_kind, group)) for group, of_kind in kinds]

        def assign() -> tuple[TensorDescription, ...]:
            own = [plan_writes(all_held, g.ranks, self._max_shard_bytes)[g.rank] for g, all_held in everybody]
            together = (description for of_kind in own for description in of_kind)
            return own[0] if len(own) == 1 else tuple(sorted(together, key=_file_order))

        own = run_on_all_ranks(assign, state.world)
        ranks = tuple(gather_from_world(own, state))
        run_on_all_ranks(lambda: check_writes(ranks), state.world)
        return SavePlan(held, own, ranks)


def plan_writes(
    descriptions: Sequence[Sequence[TensorDescription]],
    ranks: Sequence[int],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[tuple[TensorDescription, ...]]:
    """Assign each box to the rank that writes it; every rank computes the same plan from all descriptions.

    ``descriptions[i]`` lists what ``ranks[i]`` holds. Copies that are not owners are not written. Of the ranks that own
    an equal box (data- and context-parallel replicas) the one with the fewest bytes so far writes it, large boxes
    first. The first rank's list also includes the tensors of which it writes nothing.

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
                for part in split_box(box, dtype_of(description.dtype).itemsize, max_shard_bytes):
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
    """Check that the boxes that all ranks write cover every tensor exactly; ``ranks[r]`` is the list of rank ``r``.

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
        # Subtracting boxes in the order of their offsets keeps the number of remaining boxes small.
        gaps = uncovered(whole, sorted(boxes[name], key=lambda box: box.offset))
        if gaps:
            raise CheckpointError(f"no rank has {name}{describe_box(gaps[0])}; nothing was saved")
        if sum(box.num_elements for box in boxes[name]) != whole.num_elements:
            raise CheckpointError(f"ranks that are not replicas of each other own the same part of {name}")


def _check_alike(first: TensorDescription, other: TensorDescription, rank: int) -> None:
    if (first.global_shape, first.dtype) != (other.global_shape, other.dtype):
        raise CheckpointError(
            f"ranks disagree on {first.name}: it is {first.dtype} {list(first.global_shape)}, but {other.dtype} "
            f"{list(other.global_shape)} on rank {rank}"
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
    """Destination of a cell's values: a box of the local tensor at index ``target`` of the plan's list."""

    target: int
    destination: Box


@dataclass(frozen=True)
class Cell:
    """Box of a stored shard, relative to the shard's origin, and all destinations of its values.

    A cell without destinations is read only for the checksum of its shard.
    """

    box: Box
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class ShardRead:
    """Stored shard with the disjoint cells of it that this rank reads."""

    tensor: StoredTensor
    shard: StoredShard
    cells: tuple[Cell, ...]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes in the file that the cells cover."""
        return sum(cell.box.num_elements for cell in self.cells) * dtype_of(self.tensor.dtype).itemsize

    @property
    def is_whole(self) -> bool:
        """Return whether the cells cover the whole shard."""
        return sum(cell.box.num_elements for cell in self.cells) == self.shard.box.num_elements


def plan_reads(
    wanted: Sequence[tuple[str, Sequence[Shard]]],
    stored: Mapping[str, StoredTensor],
    ranks: Sequence[Sequence[TensorDescription]] = (),
    rank: int = 0,
    verify: bool = True,
) -> tuple[ShardRead, ...]:
    """Plan this rank's reads to fill the shards of its local tensors, in the order of their position on disk.

    No element is read twice. ``ranks`` lists what every rank requests, with this rank at index ``rank``; without it,
    this rank is the only one. The reads of all ranks are split into the same cells, so that the ranks can verify a
    shard's single checksum together. With ``verify``, parts of a shard that no rank requests are read by the first rank
    that requests another part of it.

    Raises:
        CheckpointError: a requested box is not stored, or only in part; the message names it and its tensor.
    """
    if not ranks:
        ranks, rank = [[_describe(name, shards, stored) for name, shards in wanted]], 0
    places: dict[str, list[tuple[int, Shard]]] = {}
    for target, (name, shards) in enumerate(wanted):
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        places.setdefault(name, []).extend((target, shard) for shard in shards)
        _check_covered(stored[name], shards)
    boxes = _boxes_by_tensor(ranks, set(places))
    reads = []
    for name, own in places.items():
        tensor = stored[name]
        cells = refine([box for held in boxes[name] for box in held])
        for shard in tensor.shards:
            read = ShardRead(tensor, shard, _own_cells(shard.box, cells, own))
            if not read.cells:
                continue
            if verify and _first_reader(shard.box, boxes[name]) == rank:
                unwanted = [Cell(box.relative_to(shard.box.offset), ()) for box in uncovered(shard.box, cells)]
                read = ShardRead(tensor, shard, (*read.cells, *unwanted))
            reads.append(read)
    return tuple(sorted(reads, key=lambda read: (read.shard.file, read.shard.start)))


def refine(boxes: Iterable[Box]) -> list[Box]:
    """Split boxes into disjoint cells, so that each box is a union of cells."""
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


def _describe(name: str, shards: Sequence[Shard], stored: Mapping[str, StoredTensor]) -> TensorDescription:
    tensor = stored.get(name)
    shape, dtype = ((), "") if tensor is None else (tensor.global_shape, tensor.dtype)
    return TensorDescription(name, shape, dtype, tuple(shard.global_box for shard in shards))


def _boxes_by_tensor(ranks: Sequence[Sequence[TensorDescription]], names: set[str]) -> dict[str, list[list[Box]]]:
    """Return the boxes that each rank requests, for each of the tensors."""
    boxes: dict[str, list[list[Box]]] = {name: [[] for _ in ranks] for name in names}
    for number, descriptions in enumerate(ranks):
        for description in descriptions:
            if description.name in names:
                boxes[description.name][number].extend(description.boxes)
    return boxes


def _check_covered(tensor: StoredTensor, shards: Sequence[Shard]) -> None:
    for shard in shards:
        gaps = uncovered(shard.global_box, [stored.box for stored in tensor.shards])
        if gaps:
            raise CheckpointError(f"the checkpoint lacks {tensor.name}{describe_box(gaps[0])}")


def _own_cells(stored_box: Box, cells: Sequence[Box], own: Sequence[tuple[int, Shard]]) -> tuple[Cell, ...]:
    """Return the cells within a stored box that this rank requests, each with its destinations."""
    found = []
    for cell in cells:
        common = cell.intersect(stored_box)
        if common is None:
            continue
        copies = tuple(
            Copy(target, shard.localized(common)) for target, shard in own if shard.global_box.intersect(cell) == cell
        )
        if copies:
            found.append(Cell(common.relative_to(stored_box.offset), copies))
    return tuple(sorted(found, key=lambda cell: cell.box.offset))


def _first_reader(stored_box: Box, boxes: Sequence[Sequence[Box]]) -> int | None:
    for number, held in enumerate(boxes):
        if any(box.intersect(stored_box) is not None for box in held):
            return number
    return None
