"""Measure saving and loading of the same tensors in turns: ours, torch.save, torch's distributed checkpoint, dd.

Every save ends when all bytes are on the disk; every load begins with no byte of it in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from trained_state import TrainedState, build_state, parse_arguments

from megatron.checkpoint.load import load_checkpoint
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.planner import CheckpointState


def sync_files(folder: Path) -> None:
    """Force every file of a folder to disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget_files(folder: Path) -> None:
    """Drop a folder's files from the page cache; they are on disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_with_dd(folder: Path, num_bytes: int) -> None:
    """Write as many bytes as the checkpoint has."""
    blocks = -(-num_bytes // (16 * 1024 * 1024))
    command = ["dd", "if=/dev/zero", f"of={folder / 'zeros'}", "bs=16M", f"count={blocks}", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def savers(state: TrainedState, num_bytes: int, folder: Path) -> dict[str, Callable[[], None]]:
    """Return what saves into folders below ``folder``, of the savers' names, which are there and empty."""
    flat = state.flat()
    folders = {name: folder / name for name in ("dd", "ours", "torch.save", "distributed")}
    for each in folders.values():
        each.mkdir(parents=True)
    saver = state.saver(folders["ours"])

    def with_torch() -> None:
        torch.save(flat, folders["torch.save"] / "state.pt")
        sync_files(folders["torch.save"])

    def with_distributed_checkpoint() -> None:
        dcp.save(flat, checkpoint_id=str(folders["distributed"]), no_dist=True)

    return {
        "dd": lambda: save_with_dd(folders["dd"], num_bytes),
        "ours": lambda: state.save(saver, 1),
        "torch.save": with_torch,
        "distributed": with_distributed_checkpoint,
    }


def loaders(state: TrainedState) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """Return what fills the state from a folder, by name, and the name of who wrote it."""
    tensors = CheckpointState(models=state.parts.chunks, optimizer=state.parts.optimizer)
    flat = state.flat()

    def ours(verify: bool) -> Callable[[Path], object]:
        def load(folder: Path) -> object:
            options = CheckpointConfig(no_load_rng=True, verify_checkpoint=verify)
            config = state.config.to_dict()
            return load_checkpoint(folder, tensors, state.runtime.state, options, config, lambda line: None)

        return load

    def with_torch(folder: Path) -> None:
        loaded = torch.load(folder / "state.pt", weights_only=True)
        for name, tensor in flat.items():
            tensor.copy_(loaded[name])

    def with_distributed_checkpoint(folder: Path) -> None:
        dcp.load(flat, checkpoint_id=str(folder), no_dist=True)

    return {
        "ours, checksums compared": ("ours", ours(True)),
        "ours, checksums not compared": ("ours", ours(False)),
        "torch.load": ("torch.save", with_torch),
        "torch.distributed.checkpoint": ("distributed", with_distributed_checkpoint),
    }


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=5)
    options, workload = parse_arguments(parser)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = build_state(workload)
    num_bytes = sum(tensor.nbytes for tensor in state.flat().values())
    saves: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for _ in range(options.num_rounds):
        for name, save in savers(state, num_bytes, options.folder).items():
            folder = options.folder / name
            os.sync()
            saves.setdefault(name, []).append(timed(save))
            sizes[name] = bytes_in(folder)
            for loader, (writer, load) in loaders(state).items():
                if writer == name:
                    forget_files(folder)
                    loads.setdefault(loader, []).append(timed(functools.partial(load, folder)))
            print(f"{name}: {sizes[name] / saves[name][-1] / 1e9:.2f} GB/s", flush=True)
            shutil.rmtree(folder)
    figures = {"num_bytes": num_bytes, "file_bytes": sizes, "save_s": saves, "load_s": loads}
    options.output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
