"""Run tools/preprocess_data.py with small chunks: ``CHUNK_BYTES FLAGS`` or ``CHUNK_BYTES --die-everywhere FLAGS``.

A step is a call of the leader that changes the file system in a way that a later run can see. ``--die-everywhere`` does
the whole work with a death at step 1, then at step 2, and so on, each followed by a run that goes on, and prints the
hash of what each pair of runs left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.cli import preprocess_data
from megatron.data import input_chunks

STEPS = ("replace", "write", "pwrite", "ftruncate", "mkdir", "rmdir", "unlink", "open", "fsync")


def die_at(step: int) -> None:
    """End this process, but not its workers, at the ``step``-th call of any of `STEPS`."""
    leader = os.getpid()
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += os.getpid() == leader
            if count == step and os.getpid() == leader:
                os._exit(9)
            return function(*arguments, **keywords)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def run(flags: list[str], step: int | None = None) -> int:
    """Preprocess in a child process and return its exit status."""
    child = os.fork()
    if child == 0:
        sys.argv = ["preprocess_data.py", *flags]
        if step is not None:
            die_at(step)
        os._exit(preprocess_data.main())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_everywhere(flags: list[str]) -> None:
    """Print the hash of the output folder after a death at each step and a run that goes on."""
    folder = Path(flags[flags.index("--output-prefix") + 1]).parent
    step, status = 0, 9
    while status == 9:
        step += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        status = run(flags, step)
        assert status in (0, 9), f"step {step}: status {status}"
        assert status == 0 or run(flags) == 0, f"going on after step {step}"
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        print("output", step, digest.hexdigest(), *sorted(path.name for path in folder.iterdir()), flush=True)


if __name__ == "__main__":
    # Slots for tokens become as small: a longer line does not fit into one.
    input_chunks.CHUNK_BYTES = preprocess_data.CHUNK_BYTES = int(sys.argv[1])
    if sys.argv[2:3] == ["--die-everywhere"]:
        die_everywhere(sys.argv[3:])
    else:
        sys.argv[1:2] = []
        sys.exit(preprocess_data.main())
