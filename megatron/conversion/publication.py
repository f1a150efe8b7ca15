"""Write a checkpoint under a temporary name, check it there, and only then publish it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing.disk import sync_folder
from megatron.core.errors import CheckpointError
from megatron.interop.new_iteration import TRACKER_FILE, iteration_folder
from megatron.training.fault_tolerance.run_lock import FOLDER_RECORD, own_folder

STAGING_FOLDER = ".converting"


def refuse_existing(save_dir: Path, iteration: int | Literal["release"]) -> Path:
    """Return the folder that a converted checkpoint will have.

    Raises:
        CheckpointError: there is one already.
    """
    if save_dir.exists() and not save_dir.is_dir():
        raise CheckpointError(f"--save-dir {save_dir} is a file; name a folder")
    folder = save_dir / iteration if isinstance(iteration, str) else iteration_folder(save_dir, iteration)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; remove it, or give another --save-dir")
    return folder


def publish_checked(
    save_dir: Path,
    iteration: int | Literal["release"],
    write: Callable[[Path], Path],
    check: Callable[[Path], None],
    log: Callable[[str], None],
) -> Path:
    """Write and check a checkpoint, then publish it in ``save_dir`` and let the tracker file name it.

    ``write`` is given a folder to write a run's folder into and returns that of the iteration; ``check`` is given the
    latter and raises where it must not appear. Nothing is left of one that does not.

    Raises:
        CheckpointError: there is one already, or another conversion into the folder is under way.
        FolderInUseError: a run saves into the folder.
    """
    final = refuse_existing(save_dir, iteration)
    with _staging(save_dir, log) as staging:
        folder = write(staging)
        check(folder)
        os.rename(folder, final)
        sync_folder(save_dir)
        os.rename(staging / TRACKER_FILE, save_dir / TRACKER_FILE)
        sync_folder(save_dir)
    return final


@contextmanager
def _staging(save_dir: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Give an empty hidden folder that is this process's own, and remove it, and what it made to have it."""
    made = [folder for folder in (save_dir, *save_dir.parents) if not folder.exists()]
    staging = save_dir / STAGING_FOLDER
    try:
        staging.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"cannot write into --save-dir {save_dir}: {error.strerror}; give another folder"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"another conversion is writing into {save_dir}; wait for it to end") from error
        left = list(staging.iterdir())
        if left:
            log(f"removing what an interrupted conversion left in {staging}")
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            owner = own_folder(
                save_dir, secrets.token_hex(4), "a conversion", log, FOLDER_RECORD, f"--save-dir {save_dir}"
            )
            with ExitStack() as stack:
                stack.callback(owner.release)
                yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()
    finally:
        os.close(descriptor)
