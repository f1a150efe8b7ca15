"""Read and write Megatron-LM's ``torch`` format at any layout, as global tensors under native names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.checkpoint import CheckpointSource, TensorInfo, new_iteration, refuse_misfits
from megatron.checkpoint.formats.megatron.arguments import (
    check_arguments,
    check_hybrid,
    config_of_arguments,
    has_experts,
)
from megatron.checkpoint.formats.megatron.common_state import common_state, model_of_tensors, real_vocab_size
from megatron.checkpoint.formats.megatron.rank_files import RankFile, open_expert_files, open_rank_files
from megatron.checkpoint.formats.megatron.rank_planner import (
    FLOAT8_SCALING,
    CarriedValues,
    PlannedFile,
    RankExtras,
    RankPlanner,
    Slot,
    carried_from,
)
from megatron.checkpoint.formats.megatron.stage_parameters import (
    WORD_EMBEDDING,
    LocalParameter,
    StageDescriber,
    is_narrow_map,
)
from megatron.checkpoint.formats.megatron.stored_optimizer import has_optimizer, stored_states
from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor, TorchFile, native_row_blocks
from megatron.checkpoint.formats.megatron.torch_file_writer import TorchFileWriter
from megatron.core.config_base import config_from_dict
from megatron.core.dist_checkpointing import sync_folder
from megatron.core.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from megatron.core.models.gpt import GPTConfig, padded_vocab_size
from megatron.core.object_store import local_copy
from megatron.core.sharding import Box, Shard, split_box
from megatron.core.tokenizers import TOKENIZER_FOLDER

_MOST_NAMED = 4


@dataclass(frozen=True)
class RankFileBox:
    """Location of the values of one box of a global tensor."""

    box: Box
    file: TorchFile
    tensor: LazyTensor


class MegatronTorchSource:
    """Tensors of an iteration's ``mp_rank_XX`` folders; implements `CheckpointSource`.

    ``vocab_size`` is the tokenizer's vocabulary size; further rows are padding. By default it comes from the file's
    arguments (see `real_vocab_size`). ``wanted`` is the configuration of the model to fill, which provides the values
    that the oldest files lack (see `model_of_tensors`).

    Raises:
        CheckpointError: the files do not hold a GPT model, or are inconsistent.
        DamagedCheckpointError: a file is missing or damaged.
    """

    @refuse_misfits
    def __init__(self, folder: Path, vocab_size: int | None = None, wanted: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.ranks = open_rank_files(folder)
        self._expert_ranks: list[RankFile] = []
        try:
            self._open(vocab_size, wanted)
        except BaseException:
            self.close()
            raise

    def _open(self, vocab_size: int | None, wanted: Mapping[str, Any] | None) -> None:
        first = self.ranks[0, 0]
        self.tp, self.pp = (1 + max(rank[axis] for rank in self.ranks) for axis in (0, 1))
        self.num_chunks = len(first.chunks)
        self.has_optimizer = all(has_optimizer(rank) for rank in self.ranks.values())
        if has_experts(first.arguments):
            self._expert_ranks = open_expert_files(self.folder)
        self.padded_vocab_size = first.chunks[0][WORD_EMBEDDING].shape[0] * self.tp
        check_arguments(first.arguments, first.file.path)
        self.config = config_of_arguments(first.arguments)
        self.config["model"] |= model_of_tensors(self.ranks, bool(first.arguments), wanted)
        self.config["model"]["vocab_size"] = vocab_size or real_vocab_size(
            first.arguments, self.padded_vocab_size, self.folder
        )
        if vocab_size is not None:
            self._check_vocabulary(vocab_size)
        self.model = _build_model_config(self.config["model"], first)
        self.common: Mapping[str, Any] = common_state(self.ranks, self.config, self.model, self.has_optimizer)
        self._boxes: dict[str, list[RankFileBox]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._describer = StageDescriber(self.model, self.padded_vocab_size, cuts_narrow=self._cuts_narrow())
        for rank in (*self.ranks.values(), *self._expert_ranks):
            self._add_rank(rank)
        self._check_whole()

    def _cuts_narrow(self) -> bool:
        """Return whether the files hold shards of MLA's down projections instead of replicas."""
        rows = {tensor.shape[0] for key, tensor in self.ranks[0, 0].chunks[0].items() if is_narrow_map(key)}
        whole = {self.model.mla.q_lora_rank, self.model.mla.kv_lora_rank + self.model.mla.qk_pos_emb_head_dim}
        return bool(rows - whole)

    @property
    def layer_numbers(self) -> dict[tuple[int, int], range]:
        """Return the global layer numbers of every (PP rank, model chunk)."""
        numbers, start = {}, 0
        for chunk in range(self.num_chunks):
            for pp_rank in range(self.pp):
                count = self.ranks[0, pp_rank].num_layers(chunk)
                numbers[pp_rank, chunk] = range(start, start + count)
                start += count
        return numbers

    @property
    def checkpoint_version(self) -> float:
        """Return the files' ``checkpoint_version``, which determines the order of QKV rows."""
        return self.ranks[0, 0].version

    @refuse_misfits
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor; only the needed pages are read."""
        info = self.tensors[name]
        box = info.whole if box is None else box
        result = torch.empty(box.shape, dtype=info.dtype)
        for stored in self._boxes[name]:
            common = stored.box.intersect(box)
            if common is not None:
                part = stored.tensor.box(common.relative_to(stored.box.offset).offset, common.shape)
                result[common.relative_to(box.offset).slices] = stored.file.view(part)
                stored.file.release_pages()
        return result

    @refuse_misfits
    def random_states(self) -> dict[tuple[int, int], Any]:
        """Return the stored random number streams by (TP rank, PP rank)."""
        stored = {place: rank.file.value.get("rng_state") for place, rank in self.ranks.items()}
        return {place: self.ranks[place].file.with_tensors(value) for place, value in stored.items()}

    @refuse_misfits
    def float8_scaling(self) -> Mapping[str, torch.Tensor]:
        """Return the state of FP8 delayed scaling by name, which is equal on all ranks; usually empty."""
        file = next(iter(self.ranks.values())).file
        scaling: Mapping[str, torch.Tensor] = file.with_tensors(file.value.get(FLOAT8_SCALING) or {})
        return scaling

    def check_storages(self, index: int = 0, count: int = 1) -> None:
        """Verify the checksums of every ``count``-th storage, starting at ``index``.

        Raises:
            DamagedCheckpointError: a storage does not match its checksum; the message names the tensor.
        """
        stored = {
            (s.file.path, s.tensor.storage.key): (name, s.file) for name, boxes in self._boxes.items() for s in boxes
        }
        for number, ((_, key), (name, file)) in enumerate(stored.items()):
            if number % count == index:
                try:
                    file.check_storage(key)
                except DamagedCheckpointError as error:
                    raise DamagedCheckpointError(f"{error}; the file contains {name}") from error

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for rank in (*self.ranks.values(), *self._expert_ranks):
            rank.close()

    def _check_vocabulary(self, vocab_size: int) -> None:
        """Reject files whose padded vocabulary size differs from the padded size of the caller's vocabulary."""
        divisor = self.config["model"].get("make_vocab_size_divisible_by")
        if divisor is None:
            return
        expected = padded_vocab_size(vocab_size, divisor, self.tp)
        if expected != self.padded_vocab_size:
            raise CheckpointError(
                f"checkpoint {self.folder} has a padded vocabulary of {self.padded_vocab_size} rows, but the "
                f"{vocab_size} tokens of this run's tokenizer are padded to {expected}; use the checkpoint's tokenizer"
            )

    def _add_rank(self, rank: RankFile) -> None:
        if len(rank.chunks) != self.num_chunks:
            raise CheckpointError(
                f"{rank.file.path} contains {len(rank.chunks)} model chunks, but other files contain {self.num_chunks}"
            )
        chunks = [self._parameters(rank, chunk) for chunk in range(self.num_chunks)]
        for parameters, tensors in zip(chunks, rank.chunks):
            for parameter in parameters:
                if rank.is_copy and not parameter.is_expert:
                    continue
                self._add(f"model.{parameter.name}", parameter, rank, rank.file, tensors[parameter.key])
        if self.has_optimizer:
            for state in stored_states(rank, chunks):
                if rank.is_copy and not state.parameter.is_expert:
                    continue
                name = f"optimizer.{state.kind}.{state.parameter.name}"
                self._add(name, state.parameter, rank, state.file, state.tensor)

    def _parameters(self, rank: RankFile, chunk: int) -> list[LocalParameter]:
        """Return a chunk's parameters in file order after checking their names and shapes."""
        described = self._describer.parameters(
            rank.tp_rank,
            self.layer_numbers[rank.pp_rank, chunk],
            has_embedding=rank.pp_rank == 0 and chunk == 0,
            has_loss=rank.pp_rank == self.pp - 1 and chunk == self.num_chunks - 1,
            ep_rank=rank.ep_rank,
        )
        by_key = {parameter.key: parameter for parameter in described}
        tensors = rank.chunks[chunk]
        problems = [f"missing: {key}" for key in by_key if key not in tensors]
        problems += [f"unexpected: {key}" for key in tensors if key not in by_key]
        problems += [
            f"{key}: shape {list(tensors[key].shape)} in the file, but {list(parameter.local_shape)} according to its "
            "args"
            for key, parameter in by_key.items()
            if key in tensors and tensors[key].shape != parameter.local_shape
        ]
        if problems:
            more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{rank.file.path} does not match the model that its args, or the flags, describe: "
                f"{'; '.join(problems[:_MOST_NAMED])}{more}"
            )
        return [by_key[key] for key in tensors]

    def _add(self, name: str, parameter: LocalParameter, rank: RankFile, file: TorchFile, tensor: LazyTensor) -> None:
        if parameter.is_replica:
            return
        info = self.tensors.setdefault(name, TensorInfo(parameter.global_shape, tensor.dtype))
        if info.dtype != tensor.dtype:
            raise CheckpointError(f"{file.path}: {name} has dtype {tensor.dtype}, but {info.dtype} on other ranks")
        blocks: Sequence[tuple[int, LazyTensor]] = [(0, tensor)]
        if ".linear_qkv." in parameter.key:
            blocks = native_row_blocks(tensor, self.model.kv_channels, rank.version)
        self._boxes.setdefault(name, []).extend(_stored_boxes(parameter, blocks, file))

    def _check_whole(self) -> None:
        for name, info in self.tensors.items():
            found = sum(stored.box.num_elements for stored in self._boxes[name])
            if found != info.num_elements:
                raise CheckpointError(
                    f"{self.folder}: only {found} of the {info.num_elements} elements of {name} are in the checkpoint"
                )


def _stored_boxes(
    parameter: LocalParameter, blocks: Sequence[tuple[int, LazyTensor]], file: TorchFile
) -> Iterator[RankFileBox]:
    """Yield the boxes of the global tensor in each block (first row, values), without padding."""
    for first_row, tensor in blocks:
        local = Box((first_row, *(0 for _ in tensor.shape[1:])), tensor.shape)
        for shard in parameter.shards:
            common = shard.local_box.intersect(local)
            if common is not None:
                values = tensor.box(common.relative_to(local.offset).offset, common.shape)
                yield RankFileBox(common.rebased(shard.local_offset, shard.global_box.offset), file, values)


def _build_model_config(values: Mapping[str, Any], rank: RankFile) -> GPTConfig:
    try:
        model = config_from_dict(GPTConfig, values)
    except ConfigurationError as error:
        raise CheckpointError(
            f"{rank.file.path}: args do not describe a valid model: {'; '.join(error.problems)}"
        ) from error
    check_hybrid(model, rank.file.path)
    return model


_DIVISOR = "make_vocab_size_divisible_by"
_MAX_READ_BYTES = 64 * 1024 * 1024


def write_megatron_torch(
    source: CheckpointSource,
    directory: str | Path,
    iteration: int | Literal["release"],
    random_states: Mapping[tuple[int, int], Any] | None = None,
) -> Path:
    """Write the source as an iteration of ``directory`` at its configuration's layout; return the folder.

    A source in this format at the same layout carries over its ``args`` and random number states. For a source in the
    other Megatron-LM format the caller passes ``random_states`` by (TP rank, PP rank). The tracker file is written
    last, after everything else is on disk. The iteration's folder must not exist.

    Raises:
        CheckpointError: writing to the file system failed.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    with new_iteration(Path(directory), iteration, f"about {needed}") as folder:
        if source.common["tokenizer"] is not None:
            shutil.copytree(local_copy(source.folder / source.common["tokenizer"]), folder / TOKENIZER_FOLDER)
        number = 0 if isinstance(iteration, str) else iteration
        _write_ranks(source, folder, number, random_states or {})
    return folder


def make_planner(source: CheckpointSource, carried: CarriedValues) -> RankPlanner:
    """Create the planner of a source's files, which keeps the values of the source's own files at the same layout.

    The vocabulary's padding is also kept, unless the configuration specifies a different divisor than the files.
    """
    model = config_from_dict(GPTConfig, source.common["config"]["model"])
    first = carried.ranks.get((0, 0))
    keeps_padding = (
        first is not None
        and 1 + max(t for t, _ in carried.ranks) == model.tensor_model_parallel_size
        and carried.arguments.get(_DIVISOR, GPTConfig.make_vocab_size_divisible_by)
        == model.make_vocab_size_divisible_by
    )
    return RankPlanner(
        source.common,
        lambda name: source.tensors[name].dtype,
        padded_vocab_size=carried.padded_vocab_size if keeps_padding else None,
        fused_norms=carried.fused_norms,
        groups_experts=bool(carried.arguments.get("moe_grouped_gemm")),
    )


def slot_shards(slot: Slot, max_bytes: int = _MAX_READ_BYTES) -> Iterator[Shard]:
    """Yield the boxes that fill a slot, each of at most ``max_bytes`` unless a single row is larger."""
    for shard in slot.parameter.shards:
        for box in split_box(shard.global_box, slot.tensor.dtype.itemsize, max_bytes):
            yield Shard(box, shard.localized(box).offset)


def write_shard(writer: TorchFileWriter, slot: Slot, shard: Shard, values: torch.Tensor) -> None:
    """Write the values of a shard of a slot's parameter to its position in the file."""
    writer.write_box(slot.tensor, slot.parameter.local_shape, slot.start, shard.local_box, values)


def _write_ranks(
    source: CheckpointSource,
    folder: Path,
    iteration: int,
    random_states: Mapping[tuple[int, int], Any],
) -> None:
    carried = carried_from(source.folder)
    planner = make_planner(source, carried)
    places = {(tp_rank, pp_rank) for tp_rank in range(planner.tp) for pp_rank in range(planner.pp)}
    states = random_states if random_states.keys() == places else {}
    is_same_layout = carried.fits(planner.tp, planner.pp, planner.stages.num_chunks)
    for pp_rank in range(planner.pp):
        for tp_rank, ep_rank in planner.expert_places:
            state = states.get((tp_rank, pp_rank))
            extras = RankExtras(arguments=carried.arguments, rng_state=state)
            if is_same_layout:
                extras = carried.ranks[tp_rank, pp_rank]
            for planned in planner.plan_rank(folder, tp_rank, pp_rank, iteration, extras, ep_rank):
                planned.file.path.parent.mkdir(exist_ok=True)
                _write_file(source, planned)
                sync_folder(planned.file.path.parent)


def _write_file(source: CheckpointSource, planned: PlannedFile) -> None:
    writer = TorchFileWriter(planned.file, create=True)
    try:
        for slot in planned.slots:
            for shard in slot_shards(slot):
                write_shard(writer, slot, shard, source.read(slot.name, shard.global_box))
        writer.finish()
    finally:
        writer.close()
