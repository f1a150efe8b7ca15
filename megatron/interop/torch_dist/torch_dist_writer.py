"""Write any source as a checkpoint of Megatron's ``torch_dist`` format, one box of a tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.core.object_store import local_copy
from megatron.core.sharding import split_box
from megatron.core.tokenizers.tokenizer_record import TOKENIZER_FOLDER
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.megatron_torch.megatron_arguments import plain_arguments
from megatron.interop.megatron_torch.rank_planner import as_values, carried_from
from megatron.interop.new_iteration import new_iteration
from megatron.interop.torch_dist.chunk_file import ChunkFile, ChunkPlace, WrittenEntry
from megatron.interop.torch_dist.folder_files import is_torch_dist
from megatron.interop.torch_dist.metadata_writer import write_shared_files
from megatron.interop.torch_dist.shared_values import read_common, read_random_states
from megatron.interop.torch_dist.stored_metadata import read_metadata
from megatron.interop.torch_dist.torch_dist_plan import TorchDistPlan

MAX_FILE_BYTES = 4 * 1024**3
"""Size at which the next data file begins."""
_MAX_CHUNK_BYTES = 64 * 1024 * 1024


def write_torch_dist(source: CheckpointSource, directory: str | Path, iteration: int | Literal["release"]) -> Path:
    """Write the source as an iteration of ``directory`` and return the folder.

    What is written loads at any layout: the configuration of the source says which one ``args`` record. A source that
    came from Megatron's files at the same layout hands on its ``args`` and its random number states. The tracker file
    is written last, when everything else is on disk; nothing of that name may be there before.

    Raises:
        CheckpointError: the file system refused.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    arguments, random_states = carried_values(source.folder)
    plan = TorchDistPlan(source.common, arguments)
    objects = list(plan.random_state_objects(random_states))
    with new_iteration(Path(directory), iteration, f"about {needed}") as folder:
        if source.common["tokenizer"] is not None:
            shutil.copytree(local_copy(source.folder / source.common["tokenizer"]), folder / TOKENIZER_FOLDER)
        written = list(_write_files(source, plan, objects, folder))
        write_shared_files(folder, plan.shared_value(has_random_states=bool(objects)), written)
    return folder


def data_file_name(rank: int, number: int) -> str:
    """Return the name of a data file of a rank."""
    return f"__{rank}_{number}.distcp"


def _write_files(
    source: CheckpointSource,
    plan: TorchDistPlan,
    objects: Iterable[tuple[str, Any]],
    folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Iterator[WrittenEntry]:
    chunks = _chunks(source, plan)
    number, is_done = 0, False
    while not is_done:
        with ChunkFile(folder / data_file_name(0, number)) as file:
            if number == 0:
                for layer in range(int(source.common["config"]["model"]["num_layers"])):
                    for key, value in plan.layer_objects(layer):
                        file.append_object(key, value)
                for key, value in objects:
                    file.append_object(key, value)
            is_done = True
            for place, values in chunks:
                file.append_chunk(place, values)
                if file.num_bytes >= max_file_bytes:
                    is_done = False
                    break
        yield from file.written
        number += 1


def _chunks(source: CheckpointSource, plan: TorchDistPlan) -> Iterator[tuple[ChunkPlace, torch.Tensor]]:
    for name, info in source.tensors.items():
        for box in split_box(info.whole, info.dtype.itemsize, _MAX_CHUNK_BYTES):
            values = source.read(name, box)
            for place in plan.places(name, info.global_shape, box):
                yield place, values
            for place in plan.padding(name, info.global_shape, box):
                yield place, torch.zeros(place.box.shape, dtype=info.dtype)


def carried_values(folder: Path) -> tuple[Mapping[str, Any], Mapping[tuple[int, int], Any]]:
    """Return what a folder of one of Megatron's formats hands on; nothing of another.

    That is the values of ``args``, and the random number states of each (tensor rank, pipeline rank).
    """
    if is_torch_dist(folder):
        arguments = plain_arguments(read_common(folder)["args"].attributes)
        return arguments, read_random_states(read_metadata(folder), as_values)
    carried = carried_from(folder)
    states = {place: extras.rng_state for place, extras in carried.ranks.items() if extras.rng_state is not None}
    return carried.arguments, states
