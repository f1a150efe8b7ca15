"""The tokenizer in a checkpoint's folder, written beside the shards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.disk import sync_folder, write_error
from megatron.core.errors import TokenizerError
from megatron.core.object_store import ObjectPath
from megatron.core.tokenizers.tokenizer_record import TOKENIZER_FOLDER
from megatron.training.checkpointing.choice import Log


def write_tokenizer_files(folder: Path, write_tokenizer: Callable[[Path], None] | None) -> str | None:
    """Leave the tokenizer in a checkpoint's folder; return why it cannot be, which is no reason to lose the checkpoint.

    Raises:
        CheckpointWriteError: the file system refused.
    """
    if write_tokenizer is None:
        return None
    tokenizer = folder / TOKENIZER_FOLDER
    if isinstance(folder, ObjectPath):
        return _upload_tokenizer(tokenizer, write_tokenizer)
    try:
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        for path in tokenizer.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(tokenizer)
    except TokenizerError as failure:
        shutil.rmtree(tokenizer, ignore_errors=True)
        return str(failure)
    except OSError as failure:
        raise write_error(tokenizer, failure) from failure
    return None


def _upload_tokenizer(target: Path, write_tokenizer: Callable[[Path], None]) -> str | None:
    """Write the tokenizer into a folder of this machine and copy its files into the store."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as name:
        local = Path(name) / TOKENIZER_FOLDER
        local.mkdir()
        try:
            write_tokenizer(local)
            for path in local.iterdir():
                (target / path.name).write_bytes(path.read_bytes())
        except TokenizerError as failure:
            return str(failure)
        except OSError as failure:
            raise write_error(target, failure) from failure
    return None


def warn_of_missing_tokenizer(warnings: Sequence[str | None], log: Log) -> bool:
    """Return whether a machine could not record the tokenizer, and log it."""
    found = list(filter(None, warnings))
    if found:
        log(f"WARNING: the checkpoint is saved without its tokenizer: {found[0]}")
    return bool(found)
