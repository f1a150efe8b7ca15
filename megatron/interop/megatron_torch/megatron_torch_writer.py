"""Write any source as a checkpoint of Megatron's own format, one tensor's rows at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.core.config_base import config_from_dict
from megatron.core.dist_checkpointing.disk import sync_folder
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.object_store import local_copy
from megatron.core.sharding import Piece, split_box
from megatron.core.tokenizers.tokenizer_record import TOKENIZER_FOLDER
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.megatron_torch.rank_planner import (
    CarriedValues,
    PlannedFile,
    RankExtras,
    RankPlanner,
    carried_from,
)
from megatron.interop.megatron_torch.rank_tree import Slot
from megatron.interop.megatron_torch.torch_file_writer import TorchFileWriter
from megatron.interop.new_iteration import new_iteration

_DIVISOR = "make_vocab_size_divisible_by"
_MAX_READ_BYTES = 64 * 1024 * 1024


def write_megatron_torch(
    source: CheckpointSource,
    directory: str | Path,
    iteration: int | Literal["release"],
    random_states: Mapping[tuple[int, int], Any] | None = None,
) -> Path:
    """Write the source as an iteration of ``directory`` at the layout of its configuration; return the folder.

    A source that came from such files at the same layout hands on its ``args`` and its random number states. Those of
    another of Megatron's formats are given, by (tensor rank, pipeline rank). The tracker file is written last, when
    everything else is on disk; nothing of that name may be there before.

    Raises:
        CheckpointError: the file system refused.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    with new_iteration(Path(directory), iteration, f"about {needed}") as folder:
        if source.common["tokenizer"] is not None:
            shutil.copytree(local_copy(source.folder / source.common["tokenizer"]), folder / TOKENIZER_FOLDER)
        number = 0 if isinstance(iteration, str) else iteration
        _write_ranks(source, folder, number, random_states or {})
    return folder


def make_planner(source: CheckpointSource, carried: CarriedValues) -> RankPlanner:
    """Return the planner of a source's files, which keeps what the source's own files had at the same layout.

    The padding of the vocabulary is kept, too, unless the configuration asks for another than the files'.
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


def slot_pieces(slot: Slot, max_bytes: int = _MAX_READ_BYTES) -> Iterator[Piece]:
    """Yield the boxes that go into a slot, none of more bytes than ``max_bytes`` unless one row has more."""
    for piece in slot.parameter.pieces:
        for box in split_box(piece.global_box, slot.tensor.dtype.itemsize, max_bytes):
            yield Piece(box, piece.localized(box).offset)


def write_piece(writer: TorchFileWriter, slot: Slot, piece: Piece, values: torch.Tensor) -> None:
    """Write the values of a piece of a slot's parameter where they belong in the file."""
    writer.write_box(slot.tensor, slot.parameter.local_shape, slot.start, piece.local_box, values)


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
            for piece in slot_pieces(slot):
                write_piece(writer, slot, piece, source.read(slot.name, piece.global_box))
        writer.finish()
    finally:
        writer.close()
