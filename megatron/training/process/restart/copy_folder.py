"""The folder of a machine's copies, in its memory: it outlives every rank, and not the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.training.process.initialize import elastic_run_id
from megatron.training.process.launcher import find_launcher, wait_for_end
from megatron.training.process.process_identity import ProcessIdentity, identify, name_process

_OWNER = "owner.json"


def make_copy_folder(base: Path, cleans_up: bool) -> Path:
    """Return the folder in ``base`` that the ranks of this launcher share, and make it.

    The rank that ``cleans_up`` starts a process that removes it when the launcher ends, and removes those of launchers
    that have ended without. Without a launcher the folder is this process's own.

    Raises:
        ConfigurationError: it cannot be made, or is somebody else's.
    """
    launcher = find_launcher(elastic_run_id())
    owner = identify(os.getpid() if launcher is None else launcher)
    prefix = f"megatron-{os.getuid()}-"
    identity = json.dumps(dataclasses.asdict(owner))
    folder = base / (prefix + hashlib.sha256(identity.encode()).hexdigest()[:12])
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        own = folder / f"{_OWNER}.{os.getpid()}"
        own.write_text(identity)
        own.rename(folder / _OWNER)
    except OSError as error:
        raise ConfigurationError(
            f"--non-persistent-local-ckpt-dir {base}: cannot make {folder} ({error.strerror}); give a folder in each "
            "machine's memory that this user may write to"
        ) from error
    if cleans_up or launcher is None:
        _remove_left_over(base, prefix)
        _remove_at_end(folder, owner.pid)
    return folder


def _remove_left_over(base: Path, prefix: str) -> None:
    for folder in base.glob(f"{prefix}*"):
        try:
            owner = ProcessIdentity(**json.loads((folder / _OWNER).read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if owner.is_alive is False:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_at_end(folder: Path, launcher: int) -> None:
    """Start a process that waits for the launcher's end, whatever ends the ranks, and removes the folder."""
    if os.fork():
        return
    os.setsid()
    name_process("copies-cleaner")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.closerange(0, 3)  # who reads what the run prints does not wait for this process
    wait_for_end(launcher)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
