"""List a checkpoint's contents: tensors, layout, progress and configuration."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.checkpoint_folder import (
    FORMAT_NAMES,
    FoundCheckpoint,
    complete_iterations,
    find_checkpoint,
    iteration_folder,
    iteration_of_folder,
)
from megatron.checkpoint.checkpoint_source import CheckpointSource
from megatron.checkpoint.comparison import MAX_BOX_BYTES, parameters_of
from megatron.checkpoint.formats import NativeSource, idle_lines
from megatron.checkpoint.formats.huggingface import HUB, MODEL_RECORD, HuggingFaceSource
from megatron.checkpoint.progress import ByteProgress
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.config import config_parts
from megatron.core.config_base import field_specs
from megatron.core.dist_checkpointing import MODEL_PREFIX, OPTIMIZER_PREFIX, dtype_name
from megatron.core.errors import CheckpointError
from megatron.core.sharding import split_box

_WIDTH = 118
_NO_BREAK = "\0"
_MOST_CHARACTERS = 80
"""Longer values are cut unless everything is listed."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def inspect_checkpoint(
    directory: Path,
    *,
    ckpt_step: int | None = None,
    all: bool = False,
    config: bool = False,
    no_tensors: bool = False,
    verify: bool = False,
    told: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Log a checkpoint's description; with ``verify`` also read all of it.

    The description has the settings that differ from their defaults, and the parameters by layer pattern. With
    ``config`` it has all settings, and with ``all`` also every tensor. Without ``ckpt_step`` the files of a run's other
    checkpoints are compared with their recorded sizes, too. ``told`` are the model settings that a torchtitan folder
    does not record.

    Raises:
        CheckpointError: there is no checkpoint, or one is damaged; the message names the damaged files and, if the
            newest checkpoint is damaged, the newest complete one.
    """
    found = find_checkpoint(directory, ckpt_step)
    others = [] if ckpt_step is not None or found.folder == directory else other_iterations(directory, found.folder)
    damage = list(find_damage(others, told))
    try:
        source = open_checkpoint(found.folder, verify=verify, told=told)
    except CheckpointError as error:
        raise CheckpointError("\n".join((str(error) + _alternative(others, told), *damage))) from error
    for line in () if found.format == "torchtitan" else idle_lines(told or {}):
        log(line)
    try:
        for line in describe(found, source, is_whole=all or config):
            log(line)
        if not no_tensors:
            for line in tensor_table(source) if all else parameter_table(source):
                log(line)
        if verify:
            try:
                read_all(source, log)
            except CheckpointError as error:
                raise CheckpointError(str(error) + _alternative(others, told)) from error
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


def _alternative(others: Sequence[Path], told: Mapping[str, Any] | None) -> str:
    """Return the end of a message that names the newest complete one of a run's other checkpoints, if there is one."""
    for folder in reversed(others):
        if not any(find_damage([folder], told)):
            return f"; {folder.name} is complete: --ckpt-step {iteration_of_folder(folder)} loads it"
    return ""


def describe(found: FoundCheckpoint, source: CheckpointSource, *, is_whole: bool = False) -> Iterator[str]:
    """Yield the lines about the checkpoint as a whole; with ``is_whole``, also settings at their defaults."""
    common = source.common
    weights = [info for name, info in source.tensors.items() if name.startswith(MODEL_PREFIX)]
    states = [info for name, info in source.tensors.items() if name.startswith(OPTIMIZER_PREFIX)]
    yield f"checkpoint: {found.folder}"
    yield f"format: {FORMAT_NAMES[found.format]}"
    if (origin := (common.get(MODEL_RECORD) or {}).get(HUB)) is not None:
        yield f"from the Hugging Face Hub: {origin['name']}, revision {origin['revision']}"
    yield f"parameters: {parameters_of(source)} in {len(weights)} tensors"
    kinds = Counter(name.split(".")[1] for name in source.tensors if name.startswith(OPTIMIZER_PREFIX))
    counts = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
    yield f"optimizer state: {len(states)} tensors" + (f" ({counts})" if counts else "")
    yield f"bytes: {sum(info.num_bytes for info in [*weights, *states])}"
    config: Mapping[str, Any] = common["config"]
    tokenizer = config["tokenizer"].get("tokenizer_type", "GPT2BPETokenizer")
    if is_whole:
        for section in ("progress", "layout", "optimizer", "scheduler"):
            yield f"{section}:{'' if common[section] else ' none'}"
            yield from _members(common[section] or {})
        yield f"tokenizer: {tokenizer}"
        yield "configuration:"
        yield from _members(config)
        return
    for section in ("progress", "layout", "optimizer", "scheduler"):
        values = common[section] or {}
        scalars = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
        yield from _one_paragraph(f"{section}:", scalars)
    yield f"tokenizer: {tokenizer}"
    yield "settings that differ from their defaults (--config lists all):"
    scalars = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    yield from _one_paragraph("  run:", scalars)
    for section, values in config.items():
        if isinstance(values, Mapping) and (changed := _changed(section, values)):
            yield from _one_paragraph(f"  {section}:", changed)


def _changed(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section of the configuration that differ from their fields' defaults."""
    parts = config_parts()
    specs = {spec.name: spec for spec in field_specs(parts[section])} if section in parts else {}
    found = {}
    for name, value in values.items():
        spec = specs.get(name)
        same = tuple(value) if isinstance(value, list) else value
        # The values of the flags on the command line are in the other fields.
        if name == "given_arguments" or (spec is not None and not spec.is_required and same == spec.default):
            continue
        found[name] = value
    return found


def _one_paragraph(heading: str, values: Mapping[str, Any]) -> list[str]:
    """Return a heading followed by the values that are set, wrapped."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    # A name and its value stay on one line.
    words = " ".join(f"{name}={_cut(value)}".replace(" ", _NO_BREAK) for name, value in given.items()) or "none"
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(f"{heading.lstrip()} {words}", _WIDTH, subsequent_indent="    ", **options)
    indent = heading[: len(heading) - len(heading.lstrip())]
    return [indent + line.replace(_NO_BREAK, " ") for line in lines]


def _cut(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def parameter_table(source: CheckpointSource) -> Iterator[str]:
    """Yield one line per pattern of parameters: tensors whose names differ in numbers only, such as that of the layer.

    Columns: pattern, shape, dtype, number of tensors, and bytes of all of them.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, info in sorted(source.tensors.items()):
        if name.startswith(MODEL_PREFIX):
            shape = "x".join(map(str, info.global_shape)) or "scalar"
            pattern = _NUMBER.sub("*", name)
            groups.setdefault((pattern, shape, dtype_name(info.dtype)), []).append(info.num_bytes)
    rows = [(*group, str(len(sizes)), str(sum(sizes))) for group, sizes in groups.items()]
    yield from _aligned([("parameters (--all lists every tensor)", "shape", "dtype", "tensors", "bytes"), *rows])


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
    yield from _aligned([("tensor", "shape", "dtype", "bytes", "pieces"), *rows])


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
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
