"""Load a run from Megatron-LM's formats at any layout, and save to them at the run's own layout.

The formats are ``torch`` (one file per model-parallel rank) and ``torch_dist``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint import METADATA_FILE, CheckpointSource, is_torch_dist
from megatron.checkpoint.formats.megatron.parameter_keys import CHOOSING_BIAS
from megatron.checkpoint.formats.megatron.rank_planner import (
    CHECKPOINT_VERSION,
    PlannedFile,
    RankExtras,
    RankPlanner,
    Slot,
)
from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource
from megatron.checkpoint.formats.megatron.torch_dist_writer import (
    ChunkFile,
    ChunkPlace,
    TorchDistPlan,
    WrittenEntry,
    data_file_name,
    write_shared_files,
)
from megatron.checkpoint.formats.megatron.torch_file_writer import TorchFileWriter, given_tensor
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource
from megatron.core.collectives import all_gather_objects, raise_on_all_ranks, run_on_all_ranks
from megatron.core.dist_checkpointing import (
    FLOAT8_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    STRICT,
    CheckpointIndex,
    LoadedTensors,
    Progress,
    ShardedTensor,
    StagingArea,
    StoredTensor,
    Strictness,
    dtype_name,
    find_misfits,
    ignore_progress,
    rng_name,
    sync_folder,
    write_error,
)
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState, all_gather_from_world
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import Box
from megatron.core.tensor_parallel import DEFAULT


def prefixes_held_apart(ddp: Mapping[str, Any], replicas: Group) -> tuple[str, ...]:
    """Return the name prefixes of tensors that only this rank holds, or of which it holds the first copy.

    ``replicas`` are the ranks over which the tensors are sharded: a different group for experts than for other
    parameters. ``ddp`` is the section of that name in the run's configuration.
    """
    levels = replicas.levels
    if levels is not None and not levels[1].is_first:
        return ()
    if ddp["data_parallel_sharding_strategy"] == "optim_grads_params":
        return MODEL_PREFIX, OPTIMIZER_PREFIX
    return (OPTIMIZER_PREFIX,) if ddp["use_distributed_optimizer"] else ()


def is_held_apart(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether no other rank of the group holds this rank's shard; the router's bias is always replicated."""
    return name.startswith(prefixes) and not name.endswith(CHOOSING_BIAS)


MegatronSource = MegatronTorchSource | TorchDistSource

STREAM_PLACES: Mapping[str, tuple[str, ...]] = {DEFAULT: ("cuda_rng_state",)}
"""Path of a random number stream within an entry of ``rng_state``."""
_SEED_STEP_OF_STAGE = 100
_EXPERT_SEED = 1024
_MODEL_PARALLEL_SEED = 2718


@dataclass(frozen=True, eq=False)
class SourceCheckpoint:
    """Open files of a checkpoint in any format other than native; each rank reads the boxes that it holds.

    ``config`` is the configuration that the files record.
    """

    source: CheckpointSource
    index: CheckpointIndex
    streams: Mapping[str, torch.Tensor]
    state: ParallelState
    config: Mapping[str, Any]

    @property
    def version(self) -> float:
        """Return the files' ``checkpoint_version``; other formats have the parameter order of the newest version."""
        source = self.source
        return source.checkpoint_version if isinstance(source, MegatronTorchSource) else CHECKPOINT_VERSION

    def load(
        self,
        tensors: Sequence[ShardedTensor],
        namespaces: Sequence[str],
        strictness: Strictness = STRICT,
        allow_cast: bool = False,
        progress: Progress = ignore_progress,
    ) -> LoadedTensors:
        """Fill every rank's tensors in place.

        Raises:
            CheckpointError: names, shapes or dtypes do not match; the message lists all of them. Raised on every rank.
        """
        world = self.state.world
        descriptions = all_gather_from_world([tensor.describe() for tensor in tensors], self.state)
        misfits = find_misfits(descriptions, self.index.tensors, namespaces, allow_cast)
        problems = misfits.problems(strictness)
        if problems:
            raise CheckpointError(f"checkpoint {self.source.folder} does not match this run: {'; '.join(problems)}")
        present = [tensor for tensor in tensors if tensor.name in self.index.tensors]
        bytes_read = run_on_all_ranks(lambda: self._fill_all(present, progress), world)
        return LoadedTensors(bytes_read, misfits.missing, misfits.unexpected)

    def _fill_all(self, tensors: Sequence[ShardedTensor], progress: Progress) -> int:
        done, total, num_bytes = 0, sum(tensor.data.nbytes for tensor in tensors), 0
        for tensor in tensors:
            num_bytes += self._fill(tensor)
            done += tensor.data.nbytes
            progress(done, total)
        return num_bytes

    def _fill(self, tensor: ShardedTensor) -> int:
        """Fill one tensor and return the number of bytes read."""
        if tensor.name in self.streams:
            return tensor.data.copy_(self.streams[tensor.name]).nbytes
        num_bytes = 0
        with torch.no_grad(), tensor.opened():
            for shard in tensor.shards:
                values = self.source.read(tensor.name, shard.global_box)
                tensor.data[shard.local_box.slices].copy_(values)
                num_bytes += values.nbytes
        return num_bytes


def open_torch_checkpoint(
    folder: Path, state: ParallelState, verify: bool, model: Mapping[str, Any] | None
) -> SourceCheckpoint:
    """Open a folder's files on every rank; with ``verify`` the ranks divide the checksum verification.

    ``model`` is the run's model configuration.

    Raises:
        CheckpointError: a file is damaged, contains objects other than data, or holds another model. Raised on every
            rank.
    """

    def open_files() -> MegatronSource:
        vocab_size = None if model is None else model.get("vocab_size")
        source: MegatronSource
        if is_torch_dist(folder):
            source = TorchDistSource(folder, vocab_size)
        else:
            source = MegatronTorchSource(folder, vocab_size, model)
        try:
            if verify:
                source.check_storages(state.world.rank, state.world.size)
        except CheckpointError:
            source.close()
            raise
        return source

    source = run_on_all_ranks(open_files, state.world)
    # Neither belongs to a parameter: random streams belong to a rank, FP8 scaling to the whole model.
    streams = _streams(source) | {FLOAT8_PREFIX + name: each for name, each in source.float8_scaling().items()}
    stored = {
        name: StoredTensor(name, tuple(values.shape), dtype_name(values.dtype), ()) for name, values in streams.items()
    }
    return SourceCheckpoint(source, index_of(source, stored), streams, state, source.config)


def index_of(source: CheckpointSource, streams: Mapping[str, StoredTensor]) -> CheckpointIndex:
    """Build the index of a native checkpoint for a source's tensors and ``streams``."""
    tensors = {
        name: StoredTensor(name, info.global_shape, dtype_name(info.dtype), ()) for name, info in source.tensors.items()
    }
    return CheckpointIndex({**tensors, **streams}, {}, source.common)


def _streams(source: MegatronSource) -> dict[str, torch.Tensor]:
    """Return the random number streams in the files by native name, if every data-parallel rank's stream is stored.

    Megatron-LM usually stores one state for all data-parallel ranks. Here the streams differ per rank, and all are
    stored.
    """
    found = {}
    layout = source.common["layout"]
    cp, dp = layout["context_parallel_size"], layout["data_parallel_size"]
    for (tp_rank, pp_rank), states in source.random_states().items():
        if not isinstance(states, list) or len(states) != dp * cp:
            continue
        for number, entry in enumerate(states):
            for stream, keys in STREAM_PLACES.items():
                value = entry
                for key in keys:
                    value = value.get(key) if isinstance(value, Mapping) else None
                if isinstance(value, torch.Tensor):
                    place = {"pp": pp_rank, "dp": number // cp, "cp": number % cp, "tp": tp_rank}
                    found[rng_name(stream, place)] = value
    return found


@dataclass(frozen=True, eq=False)
class BoxWrite:
    """Write of values, a box of a slot's local tensor, to a file."""

    slot: Slot
    box: Box
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class FileShare:
    """This rank's writes to one file; one of the ranks that write a file creates and finishes it."""

    planned: PlannedFile
    is_creator: bool
    writes: tuple[BoxWrite, ...]

    @property
    def path(self) -> Path:
        return self.planned.file.path


@dataclass(frozen=True, eq=False)
class TorchShare:
    """This rank's writes to all files, planned collectively and written independently.

    The data- and context-parallel ranks with the same model-parallel coordinates share their files. The first creates
    them and writes its values, the others add the optimizer shards that only they hold, and the first finishes them.
    Each of these phases starts after the previous one has ended on all ranks.
    """

    folder: Path
    files: tuple[FileShare, ...]

    def staged(self, area: StagingArea) -> TorchShare:
        """Copy the values, so that training no longer changes them, and return the share with the copies."""
        writes = [(number, write) for number, file in enumerate(self.files) for write in file.writes]
        writes.sort(key=lambda item: -item[1].values.element_size())
        copies = area.copy([write.values for _, write in writes])
        by_file: dict[int, list[BoxWrite]] = {}
        for (number, write), copy in zip(writes, copies, strict=True):
            by_file.setdefault(number, []).append(replace(write, values=copy))
        files = (replace(file, writes=tuple(by_file.get(number, ()))) for number, file in enumerate(self.files))
        return TorchShare(self.folder, tuple(files))

    def create(self) -> None:
        """Create this rank's files and write its values to them.

        Raises:
            CheckpointWriteError: writing to the file system failed.
        """
        for file in self.files:
            if file.is_creator:
                with _reporting(file.path):
                    file.path.parent.mkdir(exist_ok=True)
                    _write(file, create=True)

    def add(self) -> None:
        """Write this rank's values to files that other ranks created.

        Raises:
            CheckpointWriteError: writing to the file system failed.
        """
        for file in self.files:
            if file.writes and not file.is_creator:
                with _reporting(file.path):
                    _write(file, create=False)

    def finish(self) -> None:
        """Complete this rank's files and flush them to disk.

        Raises:
            CheckpointWriteError: writing to the file system failed.
        """
        for file in self.files:
            if file.is_creator:
                with _reporting(file.path):
                    writer = TorchFileWriter(file.planned.file, create=False)
                    try:
                        writer.finish()
                    finally:
                        writer.close()
                    sync_folder(file.path.parent)
                    sync_folder(self.folder)


def plan_torch_share(
    folder: Path,
    content: Mapping[str, Any],
    tensors: Sequence[ShardedTensor],
    rng: Mapping[str, torch.Tensor],
    state: ParallelState,
) -> TorchShare:
    """Assign the writes to all ranks and return this rank's share; collective.

    ``content`` is the ``common`` section of a native checkpoint. ``rng`` holds the random number streams, if they are
    saved.

    Raises:
        CheckpointError: the ranks together do not hold all values. Raised on every rank.
    """
    params_dtype = dtype_from_name(content["config"]["model"]["params_dtype"])
    main_dtype = arithmetic_dtype(params_dtype)

    def dtype_of_name(name: str) -> torch.dtype:
        is_weight = name.startswith(MODEL_PREFIX) and not name.endswith(CHOOSING_BIAS)
        return params_dtype if is_weight else main_dtype

    planner = RankPlanner(content, dtype_of_name)
    extras = RankExtras(arguments={}, rng_state=stored_random_states(content, rng, state))
    holdings: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        holdings.setdefault(tensor.name, []).append(tensor)
    is_first = state.expert_dp.is_first
    ep_rank = state.expert_model.rank // planner.model.parallel_sizes.expert_tp
    held_apart, experts_apart = (
        prefixes_held_apart(content["config"]["ddp"], group) for group in (state.dp_cp, state.expert_dp)
    )

    def is_ours(slot: Slot, has_own_experts: bool) -> bool:
        if slot.parameter.is_expert:
            return has_own_experts and (is_first or is_held_apart(slot.name, experts_apart))
        return (is_first and has_own_experts) or is_held_apart(slot.name, held_apart)

    files = []
    shares_groups = planner.model.num_query_groups % planner.tp != 0
    iteration = content["progress"]["iteration"]
    for tp_rank, expert_rank in planner.expert_places:
        is_own, has_own_experts = tp_rank == state.tp.rank, expert_rank == ep_rank
        if not is_own and not shares_groups:
            continue
        for planned in planner.plan_rank(folder, tp_rank, state.pp.rank, iteration, extras, expert_rank):
            ours = [slot for slot in planned.slots if is_ours(slot, has_own_experts)]
            slots = [slot for slot in ours if is_own or ".linear_qkv." in slot.name]
            writes = tuple(write for slot in slots for write in _held_boxes(slot, holdings.get(slot.name, ())))
            files.append(FileShare(planned, is_own and is_first and has_own_experts, writes))
    share = TorchShare(folder, tuple(files))
    if not shares_groups:
        raise_on_all_ranks(_find_gap(share, state), state.world)
    return share


def _held_boxes(slot: Slot, held: Sequence[ShardedTensor]) -> Iterator[BoxWrite]:
    """Yield the writes of this rank's part of a slot's parameter."""
    for tensor in held:
        for own in tensor.shards:
            for shard in slot.parameter.shards:
                common = own.global_box.intersect(shard.global_box)
                if common is not None:
                    values = tensor.data[own.localized(common).slices]
                    yield BoxWrite(slot, shard.localized(common), values)


def _find_gap(share: TorchShare, state: ParallelState) -> CheckpointError | None:
    """Return an error if the ranks with these model-parallel coordinates do not write every element of their files."""
    own = {file.path: sum(write.box.num_elements for write in file.writes) for file in share.files}
    written: dict[Path, int] = {}
    for counts in all_gather_objects(own, state.dp_cp):
        for path, count in counts.items():
            written[path] = written.get(path, 0) + count
    for file in share.files:
        slots = file.planned.slots
        needed = sum(shard.global_box.num_elements for slot in slots for shard in slot.parameter.shards)
        if written[file.path] != needed:
            return CheckpointError(
                f"the ranks have only {written[file.path]} of the {needed} values of {file.path}; nothing was saved"
            )
    return None


def stored_random_states(content: Mapping[str, Any], rng: Mapping[str, torch.Tensor], state: ParallelState) -> Any:
    """Return Megatron-LM's ``rng_state``: the first data-parallel rank's state, or with dropout the state of all.

    Generators that this project does not use have Megatron-LM's initial seeds.
    """
    if not rng:
        return None
    model = content["config"]["model"]
    draws = any(model.get(f"{part}_dropout") for part in ("hidden", "attention", "embedding"))
    everybody = all_gather_objects(dict(rng), state.dp_cp)
    seed = content["config"]["initialization"]["seed"] + _SEED_STEP_OF_STAGE * state.pp.rank
    return [_rng_entry(streams[DEFAULT], seed, state.tp.rank) for streams in (everybody if draws else everybody[:1])]


def _rng_entry(own: torch.Tensor, seed: int, tp_rank: int) -> dict[str, Any]:
    def unused(seed: int) -> Any:
        state = torch.Generator().manual_seed(seed).get_state()
        if state.shape != own.shape:
            # A CUDA generator's state consists of its seed and its offset.
            state = torch.tensor([seed, 0]).view(torch.uint8)
        return given_tensor(state)

    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed % 2**32).get_state(),
        "torch_rng_state": given_tensor(torch.get_rng_state()),
        "cuda_rng_state": given_tensor(own),
        "rng_tracker_states": {
            "data-parallel-rng": unused(seed),
            "model-parallel-rng": unused(seed + _MODEL_PARALLEL_SEED + tp_rank),
            "expert-parallel-rng": unused(seed + _EXPERT_SEED + tp_rank),
        },
    }


def _write(file: FileShare, create: bool) -> None:
    writer = TorchFileWriter(file.planned.file, create)
    try:
        for write in file.writes:
            slot = write.slot
            writer.write_box(slot.tensor, slot.parameter.local_shape, slot.start, write.box, write.values)
        if not create:
            writer.sync()
    finally:
        writer.close()


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Convert an error of the file system to one that names the file and the free space."""
    try:
        yield
    except OSError as failure:
        raise write_error(path, failure) from failure


@dataclass(frozen=True, eq=False)
class ChunkWrite:
    """Write of values to one or more chunks of the checkpoint."""

    places: tuple[ChunkPlace, ...]
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class TorchDistShare:
    """This rank's writes, which go to a file of its own; the first rank then completes the folder."""

    folder: Path
    rank: int
    writes: tuple[ChunkWrite, ...]
    objects: tuple[tuple[str, Any], ...]
    common: Mapping[str, Any]

    def staged(self, area: StagingArea) -> TorchDistShare:
        """Copy the values, so that training no longer changes them, and return the share with the copies."""
        ordered = sorted(self.writes, key=lambda write: -write.values.element_size())
        copies = area.copy([write.values for write in ordered])
        writes = (replace(write, values=copy) for write, copy in zip(ordered, copies, strict=True))
        return replace(self, writes=tuple(writes))

    def write(self) -> list[WrittenEntry]:
        """Write this rank's file, if the rank has any writes, and return its entries.

        Raises:
            CheckpointWriteError: writing to the file system failed.
        """
        if not self.writes and not self.objects:
            return []
        path = self.folder / data_file_name(self.rank, 0)
        needed = sum(write.values.nbytes * len(write.places) for write in self.writes)
        try:
            with ChunkFile(path) as file:
                for key, value in self.objects:
                    file.append_object(key, value)
                for write in self.writes:
                    for place in write.places:
                        file.append_chunk(place, write.values)
        except OSError as failure:
            raise write_error(path, failure, needed) from failure
        return file.written

    def complete(self, written: Sequence[WrittenEntry]) -> None:
        """Write the metadata and shared files for the entries of all ranks; only one rank calls this.

        Raises:
            CheckpointError: the ranks together do not hold all values.
            CheckpointWriteError: writing to the file system failed.
        """
        try:
            write_shared_files(self.folder, self.common, written)
        except OSError as failure:
            raise write_error(self.folder / METADATA_FILE, failure) from failure


def plan_torch_dist_share(
    folder: Path,
    content: Mapping[str, Any],
    tensors: Sequence[ShardedTensor],
    rng: Mapping[str, torch.Tensor],
    state: ParallelState,
) -> TorchDistShare:
    """Plan this rank's share; collective. ``content`` and ``rng`` are the same as for `plan_torch_share`.

    Replicated tensors are written by the first data- and context-parallel rank. With a distributed optimizer or FSDP
    every rank writes the shards that only it holds.
    """
    plan = TorchDistPlan(content)
    ddp, is_first = content["config"]["ddp"], state.dp_cp.is_first
    ours = []
    for group, are_experts in ((state.dp_cp, False), (state.expert_dp, True)):
        held_apart = prefixes_held_apart(ddp, group)
        own = [tensor for tensor in tensors if tensor.is_owner and tensor.is_expert == are_experts]
        ours += [tensor for tensor in own if group.is_first or is_held_apart(tensor.name, held_apart)]
    random_states = stored_random_states(content, rng, state)
    objects: list[tuple[str, Any]] = []
    if is_first and state.tp.is_first:
        objects += (item for layer in sorted(_layers_of(ours)) for item in plan.layer_objects(layer))
    if is_first and random_states is not None:
        objects.append((plan.random_state_key(state.tp.rank, state.pp.rank), random_states))
    common = plan.shared_value(has_random_states=random_states is not None)
    return TorchDistShare(folder, state.rank, tuple(_writes(plan, ours)), tuple(objects), common)


def _writes(plan: TorchDistPlan, tensors: Sequence[ShardedTensor]) -> Iterator[ChunkWrite]:
    for tensor in tensors:
        name, shape = tensor.name, tensor.global_shape
        for shard, box in ((s, box) for s in tensor.shards for box in plan.boxes_of_parts(name, shape, s.global_box)):
            yield ChunkWrite(tuple(plan.places(name, shape, box)), tensor.data[shard.localized(box).slices])
            for place in plan.padding(name, shape, box):
                yield ChunkWrite((place,), torch.zeros(place.box.shape, dtype=tensor.data.dtype))


def _layers_of(tensors: Sequence[ShardedTensor]) -> set[int]:
    names = [tensor.name.split(".") for tensor in tensors]
    return {int(words[3]) for words in names if words[:3] == ["model", "decoder", "layers"]}
