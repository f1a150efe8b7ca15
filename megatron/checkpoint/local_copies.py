"""In-memory checkpoints: each rank keeps its two newest copies, and with replication also another rank's.

A copy holds the rank's shard of a checkpoint, including parameters that other ranks also hold. Each rank keeps two
copies because it may fail while it writes the newest. All ranks copy at the same iterations, and after a restart agree
on an iteration for which every rank's copy is complete.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_objects,
    any_rank,
    broadcast_object,
    exchange_bytes,
    raise_on_all_ranks,
)
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState

_PREAMBLE = struct.Struct("=QQ")


@dataclass(frozen=True)
class CopyFile:
    """File of a copy: a preamble, the bytes of all tensors, and a JSON record.

    The preamble has the sizes of both, and is zero while the file is being written, so that the file of a killed
    process is not taken for a copy.
    """

    path: Path

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Mark the file as incomplete, and return the memory of its tensors, to be filled.

        Shapes: ``-> [num_bytes]`` uint8.

        Raises:
            OSError: there is not enough space.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, _PREAMBLE.pack(0, 0), 0)
            # Writing to a mapped page without allocated space would kill the process.
            os.posix_fallocate(descriptor, 0, _PREAMBLE.size + num_bytes)
            os.ftruncate(descriptor, _PREAMBLE.size + num_bytes)
        finally:
            os.close(descriptor)
        return self._map(num_bytes)

    def complete(self, num_bytes: int, record: Mapping[str, Any]) -> None:
        """Write the record, then mark the file as complete.

        Raises:
            OSError: there is not enough space.
        """
        text = json.dumps(record).encode()
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, _PREAMBLE.size + num_bytes, len(text))
            os.pwrite(descriptor, text, _PREAMBLE.size + num_bytes)
            os.pwrite(descriptor, _PREAMBLE.pack(num_bytes, len(text)), 0)
        finally:
            os.close(descriptor)

    def record(self) -> dict[str, Any] | None:
        """Return the record, or None if the file is incomplete or missing."""
        try:
            with self.path.open("rb") as stream:
                num_bytes, length = _PREAMBLE.unpack(stream.read(_PREAMBLE.size))
                if not length:
                    return None
                stream.seek(_PREAMBLE.size + num_bytes)
                record: dict[str, Any] = json.loads(stream.read(length))
                return record
        except (OSError, struct.error, ValueError):
            return None

    def tensors(self) -> torch.Tensor:
        """Return the memory of a complete file's tensors.

        Shapes: ``-> [bytes]`` uint8.
        """
        with self.path.open("rb") as stream:
            num_bytes, _ = _PREAMBLE.unpack(stream.read(_PREAMBLE.size))
        return self._map(num_bytes)

    def _map(self, num_bytes: int) -> torch.Tensor:
        size = _PREAMBLE.size + num_bytes
        return torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)[_PREAMBLE.size :]


_ALIGNMENT = 16
_NAME = re.compile(r"(\d+)\.([01])(\.held)?")


@dataclass(frozen=True, order=True)
class CopyName:
    """Rank, iteration and run of a copy; a run that does not resume from a copy has a new random ``token``.

    ``place`` is the name of its file in the folder.
    """

    iteration: int
    token: str
    rank: int
    place: str


@dataclass(frozen=True)
class FoundCopies:
    """Newest iteration of which every rank has a copy; ``holders[r]`` is the rank that reads rank r's copy."""

    iteration: int
    token: str
    holders: tuple[int, ...]
    record: Mapping[str, Any]


class LocalCopies:
    """In-memory copies in ``folder``, which the ranks of a node share; all ranks call every method.

    With ``jump`` each rank also sends its copy to the rank ``jump`` positions after it, which keeps it too.
    """

    def __init__(self, folder: Path, state: ParallelState, device: torch.device, token: str, jump: int | None) -> None:
        self._folder = folder
        self._state = state
        self._device = device
        self._token = token
        self._jump = jump
        self._slot = 0
        self._layout = dict(state.sizes.record())

    def save(self, tensors: Sequence[torch.Tensor], record: Mapping[str, Any]) -> None:
        """Copy the tensors; ``record``, which includes the ``iteration``, is returned by a restart with them.

        Raises:
            CheckpointError: a node has not enough memory. Raised on every rank; the previous copy still exists.
            GivenUpError: communication was given up meanwhile. An unfinished copy does not count as complete.
        """
        num_bytes = _size(tensors)
        head = {"token": self._token, "layout": self._layout, "iteration": record["iteration"]}
        own = CopyFile(self._folder / f"{self._state.rank}.{self._slot}")
        error = None
        try:
            memory = own.allocate(num_bytes)
            for tensor, part in zip(tensors, _parts(memory, tensors)):
                part.copy_(tensor)
            self._state.world.ensure_not_given_up()  # the copied tensors may be gathered weights
            own.complete(num_bytes, {**head, "record": record})
        except OSError as failure:
            error = self._no_room(failure)
        raise_on_all_ranks(error, self._state.world)
        if self._jump is not None:
            self._replicate(memory, {**head, "record": record})
        self._slot = 1 - self._slot

    def find(self) -> FoundCopies | None:
        """Return the newest copies of this layout that every rank has, or None if there are none."""
        state = self._state
        seen = all_gather_objects(list(self._list()), state.world)
        holders: dict[tuple[int, str], dict[int, int]] = {}
        for holder, names in enumerate(seen):
            for name in names:
                of_iteration = holders.setdefault((name.iteration, name.token), {})
                if name.rank not in of_iteration or name.rank == holder:
                    of_iteration[name.rank] = holder
        complete = [key for key, found in holders.items() if len(found) == state.world_size]
        if not complete:
            return None
        iteration, token = max(complete)
        of_rank = holders[iteration, token]
        source = of_rank[0]
        record = None
        if state.rank == source:
            content = CopyFile(self._folder / self._place(iteration, token, 0)).record()
            record = None if content is None else content["record"]
        record = broadcast_object(record, state.world, source)
        return FoundCopies(iteration, token, tuple(of_rank[rank] for rank in range(state.world_size)), record)

    def load(self, found: FoundCopies, tensors: Sequence[torch.Tensor]) -> None:
        """Fill the tensors from their copies; copies that no process of the rank's node has are sent to it.

        Raises:
            CheckpointError: the copies hold other tensors. Raised on every rank.
        """
        state, size = self._state, _size(tensors)
        memory = torch.empty(0, dtype=torch.uint8)
        for rank, holder in enumerate(found.holders):
            if state.rank == holder:
                place = self._place(found.iteration, found.token, rank)
                held = CopyFile(self._folder / place).tensors()
                if rank == holder:
                    memory = held
                else:
                    exchange_bytes(held, rank, None, None, state.world, self._device)
            elif state.rank == rank:
                memory = torch.empty(size, dtype=torch.uint8)
                exchange_bytes(None, None, memory, holder, state.world, self._device)
        error = None
        if memory.numel() != size:
            error = CheckpointError(
                f"the copy of rank {state.rank} in {self._folder} is from a different model; remove the folder"
            )
        raise_on_all_ranks(error, state.world)
        for tensor, part in zip(tensors, _parts(memory, tensors)):
            tensor.copy_(part)
        self._token = found.token
        own = self._folder / self._place(found.iteration, found.token, state.rank)
        self._slot = 1 if own.name.startswith(f"{state.rank}.0") else 0

    def forget(self) -> None:
        """Remove every copy that this rank made or keeps, since the run does not resume from any."""
        held = None if self._jump is None else (self._state.rank - self._jump) % self._state.world_size
        for slot in (0, 1):
            (self._folder / f"{self._state.rank}.{slot}").unlink(missing_ok=True)
            (self._folder / f"{held}.{slot}.held").unlink(missing_ok=True)
        any_rank(False, self._state.world)

    def _replicate(self, memory: torch.Tensor, content: Mapping[str, Any]) -> None:
        """Send this rank's copy to another rank, and keep the copy that this rank receives."""
        state, jump = self._state, self._jump or 0
        target, source = (state.rank + jump) % state.world_size, (state.rank - jump) % state.world_size
        own = torch.tensor([[self._slot, memory.numel()]], device=self._device)
        slot, num_bytes = all_gather_first_dim(own, state.world)[source].tolist()
        kept = CopyFile(self._folder / f"{source}.{slot}.held")
        error, room = None, None
        try:
            room = kept.allocate(num_bytes)
        except OSError as failure:
            error = self._no_room(failure)
        raise_on_all_ranks(error, state.world)
        exchange_bytes(memory, target, room, source, state.world, self._device)
        kept.complete(num_bytes, content)

    def _list(self) -> Iterator[CopyName]:
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            content = CopyFile(path).record() if match else None
            if match is not None and content is not None and content["layout"] == self._layout:
                yield CopyName(content["iteration"], content["token"], int(match.group(1)), path.name)

    def _place(self, iteration: int, token: str, rank: int) -> str:
        """Return the file of a copy in this process's folder, preferably the rank's own."""
        found = [name for name in self._list() if (name.iteration, name.token, name.rank) == (iteration, token, rank)]
        return min((name.place for name in found), key=len, default=f"{rank}.0")

    def _no_room(self, failure: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write the in-memory checkpoint copies of rank {self._state.rank} to {self._folder}: "
            f"{failure.strerror}; omit --non-persistent-save-interval, or use a different "
            "--non-persistent-local-ckpt-dir"
        )


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_span(tensor) for tensor in tensors)


def _span(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _parts(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each tensor's part of the memory, with its dtype and shape."""
    start = 0
    for tensor in tensors:
        yield memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _span(tensor)
