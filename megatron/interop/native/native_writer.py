"""Write a native checkpoint from any source, in the memory of one tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing.index import (
    CheckpointIndex,
    StoredPiece,
    StoredTensor,
    encode_common,
    write_index,
)
from megatron.core.dist_checkpointing.mapping import dtype_name
from megatron.core.object_store import local_copy
from megatron.core.tokenizers.tokenizer_record import TOKENIZER_FOLDER
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.native.streamed_shard import plan_files, write_streamed_shard
from megatron.interop.new_iteration import new_iteration

TokenizerWriter = Callable[[Path], bool]
MAX_FILE_BYTES = 4 * 1024**3
"""Size at which the next shard file begins; a larger tensor has a file of its own."""


def write_native(
    source: CheckpointSource,
    directory: str | Path,
    iteration: int | Literal["release"],
    max_file_bytes: int = MAX_FILE_BYTES,
    write_tokenizer: TokenizerWriter | None = None,
) -> Path:
    """Write the source's tensors and shared state as an iteration of ``directory`` and return the iteration's folder.

    What is written loads at any layout: ``source.common`` says which one the run records. ``write_tokenizer`` is given
    the iteration's folder to leave the tokenizer's record in, and returns whether there is one; without it the source's
    own goes along. The tracker file is written last, when everything else is on disk; nothing of that name may be there
    before.

    Raises:
        CheckpointError: the file system refused, or the shared state is not plain data.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    with new_iteration(Path(directory), iteration, f"{needed}") as folder:
        _write_folder(source, folder, max_file_bytes, write_tokenizer)
    return folder


def _write_folder(
    source: CheckpointSource, folder: Path, max_file_bytes: int, write_tokenizer: TokenizerWriter | None
) -> None:
    has_tokenizer = _copy_tokenizer(source, folder) if write_tokenizer is None else write_tokenizer(folder)
    common = dict(source.common) | {"tokenizer": TOKENIZER_FOLDER if has_tokenizer else None}
    encode_common(common)
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in source.tensors}
    files = {}
    for number, planned in enumerate(plan_files(list(source.tensors.items()), max_file_bytes)):
        path = folder / f"shard_{number:05d}.safetensors"
        files[path.name], written = write_streamed_shard(path, planned, source)
        for name, piece in written:
            pieces[name].append(piece)
    tensors = {
        name: StoredTensor(name, info.global_shape, dtype_name(info.dtype), tuple(pieces[name]))
        for name, info in source.tensors.items()
    }
    write_index(folder, CheckpointIndex(tensors, files, common))


def _copy_tokenizer(source: CheckpointSource, folder: Path) -> bool:
    """Copy the tokenizer's record and files; return whether the source has them."""
    recorded = source.common["tokenizer"]
    if recorded is None:
        return False
    shutil.copytree(local_copy(source.folder / recorded), folder / TOKENIZER_FOLDER)
    return True
