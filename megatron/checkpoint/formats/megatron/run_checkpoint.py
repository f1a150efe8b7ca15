"""Load a run from Megatron's formats at any layout, and save in them at the run's own layout.

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
    """Return how names begin of what this rank alone holds, or the first of copies, from a run's configuration.

    ``replicas`` are the ranks over which it is sharded: others for experts than for all else.
    """
    levels = replicas.levels
    if levels is not None and not levels[1].is_first:
        return ()
    if ddp["data_parallel_sharding_strategy"] == "optim_grads_params":
        return MODEL_PREFIX, OPTIMIZER_PREFIX
    return (OPTIMIZER_PREFIX,) if ddp["use_distributed_optimizer"] else ()


def is_held_apart(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether this rank alone holds its part of a tensor; what is not trained all of them hold whole."""
    return name.startswith(prefixes) and not name.endswith(CHOOSING_BIAS)


MegatronSource = MegatronTorchSource | TorchDistSource

STREAM_PLACES: Mapping[str, tuple[str, ...]] = {DEFAULT: ("cuda_rng_state",)}
"""Where a stream of random numbers stands in an entry of ``rng_state``."""
_SEED_STEP_OF_STAGE = 100
_EXPERT_SEED = 1024
_MODEL_PARALLEL_SEED = 2718


@dataclass(frozen=True, eq=False)
class SourceCheckpoint:
    """Offer the open files of a checkpoint of any other format; each rank reads the boxes that it holds.

    ``config`` is what the files record of the configuration.
    """

    source: CheckpointSource
    index: CheckpointIndex
    streams: Mapping[str, torch.Tensor]
    state: ParallelState
    config: Mapping[str, Any]

    @property
    def version(self) -> float:
        """Return the version that Megatron's files say; other formats have the order of the newest."""
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
            CheckpointError: names, shapes or dtypes do not fit; all of them are listed. On every rank alike.
        """
        world = self.state.world
        descriptions = all_gather_from_world([tensor.describe() for tensor in tensors], self.state)
        misfits = find_misfits(descriptions, self.index.tensors, namespaces, allow_cast)
        problems = misfits.problems(strictness)
        if problems:
            raise CheckpointError(f"checkpoint {self.source.folder} does not fit this run: {'; '.join(problems)}")
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
        """Fill one tensor and return the bytes of what was read."""
        if tensor.name in self.streams:
            return tensor.data.copy_(self.streams[tensor.name]).nbytes
        num_bytes = 0
        with torch.no_grad():
            for shard in tensor.shards:
                values = self.source.read(tensor.name, shard.global_box)
                tensor.data[shard.local_box.slices].copy_(values)
                num_bytes += values.nbytes
        return num_bytes


def open_torch_checkpoint(
    folder: Path, state: ParallelState, verify: bool, model: Mapping[str, Any] | None
) -> SourceCheckpoint:
    """Open a folder's files on every rank; with ``verify`` the ranks share out the comparison of checksums.

    ``model`` is the run's configuration of it.

    Raises:
        CheckpointError: a file is damaged, asks for what is not data, or is of another model. On every rank alike.
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
    # Neither belongs to a parameter: the one to a rank, the other to the whole model.
    streams = _streams(source) | {FLOAT8_PREFIX + name: each for name, each in source.float8_scaling().items()}
    stored = {
        name: StoredTensor(name, tuple(values.shape), dtype_name(values.dtype), ()) for name, values in streams.items()
    }
    return SourceCheckpoint(source, index_of(source, stored), streams, state, source.config)


def index_of(source: CheckpointSource, streams: Mapping[str, StoredTensor]) -> CheckpointIndex:
    """Return what a source holds as the index of a native checkpoint would say it, with ``streams`` beside."""
    tensors = {
        name: StoredTensor(name, info.global_shape, dtype_name(info.dtype), ()) for name, info in source.tensors.items()
    }
    return CheckpointIndex({**tensors, **streams}, {}, source.common)


def _streams(source: MegatronSource) -> dict[str, torch.Tensor]:
    """Return the streams of random numbers in the files, by native name: those of every data-parallel rank, or none.

    Megatron usually stores one state for all data-parallel ranks; here they differ, and then all are stored.
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
    """Say that values, a box of a slot's local tensor, go into a file."""

    slot: Slot
    box: Box
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class FileShare:
    """Hold what this rank writes of one file; one of the ranks that write a file creates and finishes it."""

    planned: PlannedFile
    is_creator: bool
    writes: tuple[BoxWrite, ...]

    @property
    def path(self) -> Path:
        """Return where the file is written."""
        return self.planned.file.path


@dataclass(frozen=True, eq=False)
class TorchShare:
    """Hold what this rank writes of all files, planned by all ranks together and written by each on its own.

    The ranks of one model-parallel place (data- and context-parallel ones) share its files: the first creates them and
    writes what it holds, the others add the shards of the optimizer that they alone hold, the first finishes them.
    Each of the three is to begin when the one before has ended on all ranks.
    """

    folder: Path
    files: tuple[FileShare, ...]

    def staged(self, area: StagingArea) -> TorchShare:
        """Return the same share with a copy of its values, which training no longer changes."""
        writes = [(number, write) for number, file in enumerate(self.files) for write in file.writes]
        writes.sort(key=lambda item: -item[1].values.element_size())
        copies = area.copy([write.values for _, write in writes])
        by_file: dict[int, list[BoxWrite]] = {}
        for (number, write), copy in zip(writes, copies, strict=True):
            by_file.setdefault(number, []).append(replace(write, values=copy))
        files = (replace(file, writes=tuple(by_file.get(number, ()))) for number, file in enumerate(self.files))
        return TorchShare(self.folder, tuple(files))

    def create(self) -> None:
        """Create this rank's files and write what it holds of them.

        Raises:
            CheckpointWriteError: the file system refused.
        """
        for file in self.files:
            if file.is_creator:
                with _reporting(file.path):
                    file.path.parent.mkdir(exist_ok=True)
                    _write(file, create=True)

    def add(self) -> None:
        """Write what this rank holds of files that others created.

        Raises:
            CheckpointWriteError: the file system refused.
        """
        for file in self.files:
            if file.writes and not file.is_creator:
                with _reporting(file.path):
                    _write(file, create=False)

    def finish(self) -> None:
        """Complete this rank's files and force them to disk.

        Raises:
            CheckpointWriteError: the file system refused.
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
    """Agree with all ranks on who writes what, and return this rank's share; collective.

    ``content`` is the ``common`` of a native checkpoint, ``rng`` the streams of random numbers, if they are saved.

    Raises:
        CheckpointError: the ranks together do not hold everything. On every rank alike.
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
    """Yield what this rank holds of a slot's parameter."""
    for tensor in held:
        for own in tensor.shards:
            for shard in slot.parameter.shards:
                common = own.global_box.intersect(shard.global_box)
                if common is not None:
                    values = tensor.data[own.localized(common).slices]
                    yield BoxWrite(slot, shard.localized(common), values)


def _find_gap(share: TorchShare, state: ParallelState) -> CheckpointError | None:
    """Return the error where the ranks of a place do not write every element of its files."""
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
                f"the ranks hold {written[file.path]} of the {needed} values of {file.path}; nothing was saved"
            )
    return None


def stored_random_states(content: Mapping[str, Any], rng: Mapping[str, torch.Tensor], state: ParallelState) -> Any:
    """Return Megatron's ``rng_state``: that of the first rank of a place, or of all where the run has dropout.

    Generators that are not used here stand where Megatron's seeds put them at the start of a run.
    """
    if not rng:
        return None
    model = content["config"]["model"]
    draws = bool(model["hidden_dropout"] or model["attention_dropout"])
    everybody = all_gather_objects(dict(rng), state.dp_cp)
    seed = content["config"]["initialization"]["seed"] + _SEED_STEP_OF_STAGE * state.pp.rank
    return [_rng_entry(streams[DEFAULT], seed, state.tp.rank) for streams in (everybody if draws else everybody[:1])]


def _rng_entry(own: torch.Tensor, seed: int, tp_rank: int) -> dict[str, Any]:
    def unused(seed: int) -> Any:
        state = torch.Generator().manual_seed(seed).get_state()
        if state.shape != own.shape:
            # A CUDA generator's state is its seed and how far it has come.
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
    """Turn the file system's refusal into an error that names the file and what is free."""
    try:
        yield
    except OSError as failure:
        raise write_error(path, failure) from failure


@dataclass(frozen=True, eq=False)
class ChunkWrite:
    """Say that values go to one or more places of the checkpoint."""

    places: tuple[ChunkPlace, ...]
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class TorchDistShare:
    """Hold what this rank writes, into a file of its own; the first rank then completes the folder."""

    folder: Path
    rank: int
    writes: tuple[ChunkWrite, ...]
    objects: tuple[tuple[str, Any], ...]
    common: Mapping[str, Any]

    def staged(self, area: StagingArea) -> TorchDistShare:
        """Return the same share with a copy of its values, which training no longer changes."""
        ordered = sorted(self.writes, key=lambda write: -write.values.element_size())
        copies = area.copy([write.values for write in ordered])
        writes = (replace(write, values=copy) for write, copy in zip(ordered, copies, strict=True))
        return replace(self, writes=tuple(writes))

    def write(self) -> list[WrittenEntry]:
        """Write this rank's file, if it holds anything, and return what is in it.

        Raises:
            CheckpointWriteError: the file system refused.
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
        """Write the files that say what all ranks wrote; for one rank.

        Raises:
            CheckpointError: the ranks together do not hold everything.
            CheckpointWriteError: the file system refused.
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
    """Return this rank's share; collective. ``content`` and ``rng`` are as for `plan_torch_share`.

    A copy of the model writes its weights once, in its first data- and context-parallel rank; of a sharded optimizer,
    and of sharded weights, every rank writes what it alone holds.
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
        for shard in tensor.shards:
            box = shard.global_box
            places = plan.places(tensor.name, tensor.global_shape, box)
            yield ChunkWrite(tuple(places), tensor.data[shard.local_box.slices])
            for place in plan.padding(tensor.name, tensor.global_shape, box):
                yield ChunkWrite((place,), torch.zeros(place.box.shape, dtype=tensor.data.dtype))


def _layers_of(tensors: Sequence[ShardedTensor]) -> set[int]:
    names = [tensor.name.split(".") for tensor in tensors]
    return {int(words[3]) for words in names if words[:3] == ["model", "decoder", "layers"]}
