"""Write a Hugging Face model folder from a checkpoint of any format, all of it or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.disk import sync_folder
from megatron.core.errors import CheckpointError
from megatron.interop.checkpoint_source import CheckpointSource
from megatron.interop.huggingface.model_export import ModelExport

MAX_FILE_BYTES = 5_000_000_000


def write_hugging_face(
    source: CheckpointSource,
    folder: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model folder, which appears whole, by one rename, or not.

    A model that came from such a folder gets its config.json, generation_config.json, file layout and names back;
    any other gets a config.json of the family that can express it, and files of at most ``max_file_bytes``.
    ``check`` is given the finished folder under its temporary name: what it raises keeps it from appearing.

    Raises:
        CheckpointError: the folder exists and is not empty, it cannot be written, or the source lacks a tensor.
        ConfigurationError: no supported architecture can express the model.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; name a new one for the Hugging Face model")
    export = ModelExport(source, max_file_bytes)
    temporary = folder.parent / f".{folder.name}.saving"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        export.write(temporary)
        if check is not None:
            check(temporary)
        sync_folder(temporary)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        need = f"; {export.num_bytes} bytes of weights are to be written" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}{need}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
