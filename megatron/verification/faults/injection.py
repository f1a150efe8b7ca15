"""A fault at work on a run: signals, limits, bytes and connections, and how what lasts is taken back."""

from __future__ import annotations

import random
import resource
import signal
import threading
from pathlib import Path

from megatron.checkpoint.checkpoint_folder import complete_iterations, iteration_folder
from megatron.core.errors import ConfigurationError
from megatron.verification.faults.connections import drop_connections
from megatron.verification.faults.fault import Fault
from megatron.verification.faults.launch import Launch
from megatron.verification.faults.process_tree import send
from megatron.verification.faults.spoiled_script import GRADIENT_SIGNAL, WEIGHT_SIGNAL

SLICE_S = 0.05
ROOM_BYTES = 64 * 1024


class Injection:
    """Do one fault to a running launch when it is made, and take back what lasts in `undo`.

    Raises:
        ConfigurationError: it cannot be done to this run, or on this system.
    """

    def __init__(
        self, fault: Fault, launch: Launch, folder: Path, token_files: tuple[Path, ...], rng: random.Random
    ) -> None:
        self.fault = fault
        self.damaged: int | None = None
        self._ranks = launch.ranks()
        self.rank = fault.rank(sorted(self._ranks), rng)
        self.has_launcher = launch.process.pid not in self._ranks.values()
        self._over = threading.Event()
        self._slicing: threading.Thread | None = None
        self._whole: dict[Path, bytes] = {}
        self._begin(launch, folder, token_files, rng)

    def _begin(self, launch: Launch, folder: Path, token_files: tuple[Path, ...], rng: random.Random) -> None:
        pids = [pid for rank, pid in self._ranks.items() if self.rank in (None, rank)]
        match self.fault.kind, self.fault.target:
            case "kill", "launcher":
                send(launch.process.pid, signal.SIGKILL)
            case "kill", _:
                _send_all(pids, signal.SIGKILL)
            case "stop", _:
                _send_all(pids, signal.SIGSTOP)
            case "slow", _:
                self._slicing = threading.Thread(target=self._stop_in_slices, args=(pids,), daemon=True)
                self._slicing.start()
            case "fill-disk", _:
                logs = (launch.output, folder / "metrics.jsonl")
                self._limit_files(max(path.stat().st_size for path in logs if path.exists()) + ROOM_BYTES)
            case "partition", _:
                if not sum(drop_connections(pid) for pid in pids):
                    raise ConfigurationError(f"{self.fault}: rank {self.rank} has no connection over TCP")
            case "corrupt", "weight":
                _send_all(pids, WEIGHT_SIGNAL)
            case "corrupt", "gradient":
                _send_all(pids, GRADIENT_SIGNAL)
            case "corrupt", "sample":
                for path in token_files:
                    self._whole[path] = path.read_bytes()
                    _overwrite(path, b"\xff" * len(self._whole[path]))
            case _:
                _send_all(pids, signal.SIGKILL)
                launch.wait(60.0)
                self.damaged = _damage_newest(folder / "checkpoints", rng)

    def undo(self) -> None:
        """Take back what would last: slowness, full disks, and data."""
        self._over.set()
        if self._slicing is not None:
            self._slicing.join()
        if self.fault.kind == "fill-disk":
            self._limit_files(resource.RLIM_INFINITY)
        for path, content in self._whole.items():
            _overwrite(path, content)

    def _stop_in_slices(self, pids: list[int]) -> None:
        """Let processes run for one part of each slice of time only."""
        running_s = SLICE_S / self.fault.factor
        while not self._over.wait(running_s):
            _send_all(pids, signal.SIGSTOP)
            self._over.wait(SLICE_S - running_s)
            _send_all(pids, signal.SIGCONT)

    def _limit_files(self, size: int) -> None:
        for pid in self._ranks.values():
            try:
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                soft = size if hard == resource.RLIM_INFINITY else min(size, hard) if size >= 0 else hard
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
            except ProcessLookupError:
                continue


def _send_all(pids: list[int], number: int) -> None:
    for pid in pids:
        send(pid, number)


def _overwrite(path: Path, content: bytes) -> None:
    """Replace the bytes of a file that others have open or mapped."""
    with path.open("r+b") as file:
        file.write(content)


def _damage_newest(checkpoints: Path, rng: random.Random) -> int | None:
    """Change one byte of the largest file of the newest checkpoint, if there is an older one; return its iteration."""
    iterations = complete_iterations(checkpoints)
    if len(iterations) < 2:
        return None
    files = [path for path in iteration_folder(checkpoints, iterations[-1]).rglob("*") if path.is_file()]
    path = max(files, key=lambda item: item.stat().st_size)
    place = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0xFF]))
    return iterations[-1]
