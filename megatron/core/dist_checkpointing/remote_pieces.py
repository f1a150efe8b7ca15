"""Pieces in files that a rank does not see, as they lie on another machine: who sends them, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.collectives import all_gather_objects, broadcast_object
from megatron.core.dist_checkpointing.read_plan import PieceRead
from megatron.core.dist_checkpointing.shard_reader import ShardReader
from megatron.core.dist_checkpointing.validation import DamagedCheckpointError
from megatron.core.errors import CheckpointError
from megatron.core.process_group import Group

_Place = tuple[str, int, int]
"""File, first byte and number of bytes of a piece."""


def read_remote_pieces(
    reader: ShardReader, folder: Path, reads: Sequence[PieceRead], targets: Sequence[torch.Tensor], world: Group
) -> CheckpointError | None:
    """Read pieces whose files this rank does not see; every rank calls this, with as many reads as it has or none.

    Of the ranks that see a file, the first one reads the wanted pieces from it and sends each to all ranks: one piece
    at a time, whole, so that no rank holds more than one. It is the way for replicated weights, of which each machine
    wrote a part; for a checkpoint that is all on one machine it is slow. Returns what is wrong with a piece here.

    Raises:
        DamagedCheckpointError: no rank sees a file, or it cannot be read. On every rank alike.
    """
    own = {_place(read): read for read in reads}
    places = sorted({place for found in all_gather_objects(list(own), world) for place in found})
    if not places:
        return None
    senders = _find_senders(folder, sorted({file for file, _, _ in places}), world)
    error: CheckpointError | None = None
    for place in places:
        sender = senders[place[0]]
        sent = _read_bytes(folder, place) if world.rank == sender else None
        received = broadcast_object(sent, world, sender)
        if isinstance(received, CheckpointError):
            raise received
        if place in own and error is None:
            try:
                reader.read(own[place], targets, piece_bytes=received)
            except CheckpointError as failure:
                error = failure
    return error


def _find_senders(folder: Path, files: Sequence[str], world: Group) -> dict[str, int]:
    """Return the place in the group of the first rank that sees each file."""
    senders: dict[str, int] = {}
    for number, seen in enumerate(all_gather_objects([name for name in files if (folder / name).exists()], world)):
        for name in seen:
            senders.setdefault(name, number)
    missing = [name for name in files if name not in senders]
    if missing:
        raise DamagedCheckpointError(
            f"{folder}: no rank of this run finds {', '.join(missing)}; the machines that wrote these files have to "
            "take part, or the files have to be copied to one that does"
        )
    return senders


def _read_bytes(folder: Path, place: _Place) -> bytes | CheckpointError:
    name, start, num_bytes = place
    try:
        with open(folder / name, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(num_bytes)
    except OSError as failure:
        return DamagedCheckpointError(f"{folder / name}: {failure.strerror}")


def _place(read: PieceRead) -> _Place:
    return (read.piece.file, read.piece.start, read.piece.num_bytes)
