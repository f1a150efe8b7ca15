"""List a checkpoint's contents: tensors, layout, progress and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.checkpoint_folder import (
    FORMAT_NAMES,
    FoundCheckpoint,
    complete_iterations,
    find_checkpoint,
    iteration_folder,
)
from megatron.checkpoint.checkpoint_source import CheckpointSource
from megatron.checkpoint.comparison import MAX_BOX_BYTES
from megatron.checkpoint.formats import NativeSource, idle_lines
from megatron.checkpoint.formats.huggingface import HuggingFaceSource
from megatron.checkpoint.progress import ByteProgress
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.core.dist_checkpointing import MODEL_PREFIX, OPTIMIZER_PREFIX, dtype_name
from megatron.core.errors import CheckpointError
from megatron.core.sharding import split_box

_GIGABYTE = 1e9


def inspect_checkpoint(
    directory: Path,
    *,
    ckpt_step: int | None = None,
    config: bool = False,
    no_tensors: bool = False,
    verify: bool = False,
    told: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Log a checkpoint's description; with ``verify`` also read all of it.

    Without ``ckpt_step`` the files of a run's other checkpoints are compared with their recorded sizes, too. ``told``
    are the model settings that a torchtitan folder does not record.

    Raises:
        CheckpointError: there is no checkpoint, or one is damaged; the message names the damaged files.
    """
    found = find_checkpoint(directory, ckpt_step)
    others = [] if ckpt_step is not None or found.folder == directory else other_iterations(directory, found.folder)
    damage = list(find_damage(others, told))
    try:
        source = open_checkpoint(found.folder, verify=verify, told=told)
    except CheckpointError as error:
        raise CheckpointError("\n".join((str(error), *damage))) from error
    for line in () if found.format == "torchtitan" else idle_lines(told or {}):
        log(line)
    try:
        for line in describe(found, source, config):
            log(line)
        if not no_tensors:
            for line in tensor_table(source):
                log(line)
        if verify:
            read_all(source, log)
    finally:
        source.close()
    if damage:
        raise CheckpointError("\n".join(damage))


def other_iterations(directory: Path, folder: Path) -> list[Path]:
    """Return the folders of a run's checkpoints except ``folder``, oldest first."""
    folders = (iteration_folder(directory, iteration) for iteration in complete_iterations(directory))
    return [each for each in folders if each != folder]


def find_damage(folders: Iterable[Path], told: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield a message for each checkpoint with missing files, or files of another size than recorded.

    Only indices and headers are read.
    """
    for folder in folders:
        try:
            open_checkpoint(folder, verify=False, told=told).close()
        except CheckpointError as error:
            yield str(error)


def describe(found: FoundCheckpoint, source: CheckpointSource, is_whole: bool = False) -> Iterator[str]:
    """Yield the lines about the checkpoint as a whole."""
    common = source.common
    weights = [info for name, info in source.tensors.items() if name.startswith(MODEL_PREFIX)]
    states = [info for name, info in source.tensors.items() if name.startswith(OPTIMIZER_PREFIX)]
    yield f"checkpoint: {found.folder}"
    yield f"format: {FORMAT_NAMES[found.format]}"
    yield f"parameters: {sum(info.num_elements for info in weights)} in {len(weights)} tensors"
    kinds = sorted({name.split(".")[1] for name in source.tensors if name.startswith(OPTIMIZER_PREFIX)})
    yield f"optimizer state: {len(states)} tensors" + (f" ({', '.join(kinds)})" if kinds else "")
    yield f"bytes: {sum(info.num_bytes for info in [*weights, *states])}"
    for section in ("progress", "layout", "optimizer", "scheduler"):
        yield f"{section}:{'' if common[section] else ' none'}"
        yield from _members(common[section] or {})
    yield f"tokenizer: {common['config']['tokenizer'].get('tokenizer_type', 'GPT2BPETokenizer')}"
    config: Mapping[str, Any] = common["config"] if is_whole else {"model": common["config"]["model"]}
    yield "configuration:"
    yield from _members(config)


def tensor_table(source: CheckpointSource) -> Iterator[str]:
    """Yield one line per tensor: name, shape, dtype, bytes, and number of stored shards if the format has shards."""
    rows = []
    for name, info in sorted(source.tensors.items()):
        shards = len(source.stored[name].shards) if isinstance(source, NativeSource) else None
        rows.append(
            (
                name,
                "x".join(map(str, info.global_shape)) or "scalar",
                dtype_name(info.dtype),
                str(info.num_bytes),
                "-" if shards is None else str(shards),
            )
        )
    header = ("tensor", "shape", "dtype", "bytes", "pieces")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def read_all(source: CheckpointSource, log: Callable[[str], None]) -> None:
    """Read every tensor.

    Raises:
        CheckpointError: a file is missing or truncated, or does not match its checksum.
    """
    progress = ByteProgress("reading", sum(info.num_bytes for info in source.tensors.values()), log)
    for name, info in source.tensors.items():
        for box in split_box(info.whole, info.dtype.itemsize, MAX_BOX_BYTES):
            progress.add(source.read(name, box).nbytes)
    progress.finish()
    has_checksums = not isinstance(source, HuggingFaceSource)
    checked = "match their checksums" if has_checksums else "are readable; the format has no checksums"
    log(f"verified: all {len(source.tensors)} tensors {checked}")


def _members(values: Mapping[str, Any], indent: str = "  ") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _members(value, indent + "  ")
        else:
            yield f"{indent}{name}: {value}"
