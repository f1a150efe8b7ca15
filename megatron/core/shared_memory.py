"""Collectives of CPU tensors between the ranks of one node, through shared memory.

gloo sends tensors over TCP, also to processes of the same node. Here each rank copies its tensor into memory that all
ranks of the group map, and reads the tensors of the other ranks there. Sums are in the order of the ranks. So all ranks
compute the same bits, and with two ranks these are the bits that gloo computes.

As with NCCL, the ranks must start the collectives of all groups, their sends and their receives in one order.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

import torch
import torch.distributed as dist

from megatron.core.flight_recorder import format_ranks
from megatron.core.process_group import Group

_MAX_RANKS = 8
"""Larger groups use gloo, because every rank reads the tensors of all ranks."""
_NUM_SLOTS, _SLOT_BYTES = 2, 1 << 22
_POLL_S, _CONNECT_S = 0.2, 30.0
_NOTICE = struct.Struct("q")
"""Number of bytes of a piece."""

Read = Callable[[Sequence[torch.Tensor], int, int], None]
"""Callback that reads columns ``start`` to ``end`` of the ranks' tensors: ``[rows, end - start]`` per rank."""

_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = weakref.WeakKeyDictionary()
_is_used = ContextVar("is_used", default=True)


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Let the backend do all collectives of this thread inside the context, which all ranks must enter."""
    before = _is_used.set(False)
    try:
        yield
    finally:
        _is_used.reset(before)


def shared_memory_of(group: Group, tensor: torch.Tensor) -> SharedMemory | None:
    """Return the memory through which the group's ranks exchange this tensor, or None if the backend sends it.

    The tensor has the same size on all ranks. The first tensor of a communicator creates the memory, which is
    collective.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not _is_used.get():
        return None
    handle = group.handle
    assert handle is not None
    if handle not in _memories:
        is_possible = group.size <= _MAX_RANKS and dist.get_backend(handle) == "gloo"
        _memories[handle] = _connect(group, handle) if is_possible else None
    return _memories[handle]


class SharedMemory:
    """Memory that the ranks of a communicator map, with two slots per rank.

    Piece ``n`` of all tensors uses slot ``n % 2`` of each rank. A rank writes its slot, sends a notice to the other
    ranks, and waits for their notices before it reads their slots. It writes piece ``n`` only after it has read piece
    ``n - 1``, for which it had notices from all ranks. They sent these notices after they had read piece ``n - 2``, so
    no rank still reads the slot.

    A communicator has at most one collective in flight: starting another one first waits for it. After an error the
    connections are closed, and every further collective fails at once.

    ``slots`` are the slots of each rank, and ``peers`` the connections to the other ranks, by rank in the communicator.
    """

    def __init__(
        self,
        group: Group,
        handle: dist.ProcessGroup,
        slots: Sequence[torch.Tensor],
        peers: Mapping[int, socket.socket],
    ) -> None:
        # A reference to the group would keep its communicator, and with it the connections.
        self._ranks = tuple(dist.get_process_group_ranks(handle))
        self._rank = dist.get_rank(handle)
        self._recorder = None if group.flight is None else group.flight.recorder
        self._slots = slots
        self._peers = peers
        self._timeout_s = handle._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._num_written = 0
        self._pending: SharedMemoryWork | None = None
        self._is_broken = False
        weakref.finalize(self, _close, peers.values())

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> SharedMemoryWork | None:
        """Sum a contiguous tensor in place over the ranks."""
        flat = tensor.data.view(-1)

        def add(pieces: Sequence[torch.Tensor], start: int, end: int) -> None:
            _add(pieces, flat[start:end])

        return self._start(flat.view(1, -1), add, async_op)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False
    ) -> SharedMemoryWork | None:
        """Sum a contiguous tensor over the ranks and write this rank's shard along dim 0 to ``output``."""
        self._check(output, tensor)
        flat = output.data.view(-1)

        def add(pieces: Sequence[torch.Tensor], start: int, end: int) -> None:
            _add([piece[self._rank] for piece in pieces], flat[start:end])

        return self._start(tensor.data.view(len(self._ranks), -1), add, async_op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> SharedMemoryWork | None:
        """Write the ranks' contiguous tensors to ``output``, concatenated along dim 0."""
        self._check(tensor, output)
        rows = output.data.view(len(self._ranks), -1)

        def copy(pieces: Sequence[torch.Tensor], start: int, end: int) -> None:
            for row, piece in zip(rows, pieces):
                row[start:end].copy_(piece[0])

        return self._start(tensor.data.view(1, -1), copy, async_op)

    def _check(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        num_ranks = len(self._ranks)
        assert whole.numel() == num_ranks * shard.numel(), f"{whole.numel()} is not {num_ranks} × {shard.numel()}"
        assert whole.dtype == shard.dtype, f"{whole.dtype} is not {shard.dtype}"

    def _start(self, tensor: torch.Tensor, read: Read, async_op: bool) -> SharedMemoryWork | None:
        """Start a collective. An asynchronous collective of several pieces ends before this returns.

        Shapes: ``tensor: [rows, columns]``.
        """
        begun = time.monotonic()
        if self._pending is not None:
            self._pending.wait()
        work = SharedMemoryWork(self, tensor, read)
        with self._broken_by_errors():
            self._write(work.pieces[0])
            if async_op and len(work.pieces) == 1:
                self._pending = work
        if self._pending is None:
            work.wait()
        if not async_op:
            return None
        if self._recorder is not None:
            self._recorder.waited_s += time.monotonic() - begun
        return work

    def finish(self, work: SharedMemoryWork) -> None:
        """Exchange the rest of the collective in flight.

        Raises:
            DistNetworkError: a rank has closed its connection, has not written its tensor within the timeout, or has
                written a tensor of another size.
            GivenUpError: communication was given up.
        """
        with self._broken_by_errors():
            start = 0
            for number, piece in enumerate(work.pieces):
                if number:
                    self._write(piece)
                for rank in self._peers:
                    self._wait_for(rank, piece.nbytes)
                end = start + piece.shape[1]
                work.read([self._slot(rank, piece) for rank in range(len(self._ranks))], start, end)
                start = end
            self._pending = None

    @contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        if self._is_broken:
            raise dist.DistNetworkError(f"Connection closed: an earlier collective of {self._group} has failed")
        try:
            yield
        except BaseException:
            self._is_broken, self._pending = True, None
            for peer in self._peers.values():
                # A forked child may have the socket too, so closing it may not notify the other rank.
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
            _close(self._peers.values())
            raise

    def _write(self, piece: torch.Tensor) -> None:
        """Copy a piece of this rank's tensor into its next slot, and notify the other ranks."""
        self._num_written += 1
        self._slot(self._rank, piece).copy_(piece)
        for rank, peer in self._peers.items():
            try:
                peer.sendall(_NOTICE.pack(piece.nbytes))
            except OSError as error:
                raise self._lost(rank) from error

    def _slot(self, rank: int, piece: torch.Tensor) -> torch.Tensor:
        """Return the last written slot of a rank, with the shape of a piece."""
        start = self._num_written % _NUM_SLOTS * _SLOT_BYTES
        return self._slots[rank][start : start + piece.nbytes].view(piece.dtype).view(piece.shape)

    def _wait_for(self, rank: int, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                notice = self._peers[rank].recv(_NOTICE.size)
                break
            except TimeoutError:
                if self._recorder is not None:
                    self._recorder.ensure_not_given_up()
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(
                        f"rank {self._ranks[rank]} has not taken part in a collective of {self._group} within "
                        f"{self._timeout_s:g} s; if it is only slow, use a longer --distributed-timeout-minutes"
                    ) from None
            except OSError as error:
                raise self._lost(rank) from error
        if not notice:
            raise self._lost(rank)
        (found,) = _NOTICE.unpack(notice)
        if found != size:
            raise dist.DistNetworkError(
                f"rank {self._ranks[rank]} of {self._group} exchanges {found} bytes and rank "
                f"{self._ranks[self._rank]} {size} bytes; a collective needs tensors of the same size on all ranks"
            )

    @property
    def _group(self) -> str:
        return f"ranks {format_ranks(self._ranks)}"

    def _lost(self, rank: int) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"Connection closed by rank {self._ranks[rank]} of {self._group}")


class SharedMemoryWork:
    """Collective of which the first piece is written.

    Shapes: ``tensor: [rows, columns]``, cut into pieces along the columns.
    """

    def __init__(self, memory: SharedMemory, tensor: torch.Tensor, read: Read) -> None:
        self._memory = memory
        width = _SLOT_BYTES // (tensor.shape[0] * tensor.element_size())
        self.pieces = [tensor[:, start : start + width] for start in range(0, tensor.shape[1], width)]
        self.read = read
        self._is_over = False

    def wait(self) -> None:
        """Wait for the other ranks and write the result; see `SharedMemory.finish` for errors."""
        if not self._is_over:
            self._memory.finish(self)
            self._is_over = True


def _add(pieces: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    first, second, *others = (piece.view(-1) for piece in pieces)
    torch.add(first, second, out=output)
    for other in others:
        output.add_(other)


def _connect(group: Group, handle: dist.ProcessGroup) -> SharedMemory | None:
    """Create the memory of a group; collective. Return None if its ranks cannot share memory, as on several nodes."""
    own_rank, size = dist.get_rank(handle), group.size
    peers: dict[int, socket.socket] = {}
    with ExitStack() as resources:
        resources.callback(lambda: _close(peers.values()))
        listener, own = _open_endpoint(resources)
        names: list[bytes | None] = [None] * size
        dist.all_gather_object(names, None if listener is None else listener.getsockname(), group=handle)
        try:
            for rank, name in enumerate(names[:own_rank]):
                peers[rank] = _call(name, own_rank, own)
        except OSError:
            listener = None
        if not _is_true_on_all(listener is not None, handle) or listener is None:
            return None
        descriptors, slots = {own_rank: own}, []
        try:
            for rank in range(own_rank):
                _, descriptors[rank] = _receive(peers[rank], resources)
            for _ in range(own_rank + 1, size):
                rank, descriptor, peer = _accept(listener, resources)
                descriptors[rank], peers[rank] = descriptor, peer
                socket.send_fds(peer, [bytes([own_rank])], [own])
            slots = [_map(descriptors[rank]) for rank in range(size)]
        except (OSError, ValueError, KeyError):  # The other ranks must not wait for this one's answer.
            _close([listener, *peers.values()])
        if not _is_true_on_all(bool(slots), handle):
            return None
        for peer in peers.values():
            peer.settimeout(_POLL_S)
        memory = SharedMemory(group, handle, slots, dict(peers))
        peers.clear()
        return memory


def _open_endpoint(resources: ExitStack) -> tuple[socket.socket | None, int]:
    """Return a listening socket and the descriptor of this rank's slots, or no socket on a system without them."""
    try:
        listener = resources.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(_CONNECT_S)
        listener.bind(b"\0megatron-" + secrets.token_hex(16).encode())
        listener.listen(_MAX_RANKS)
        memory = os.memfd_create("megatron")
        resources.callback(os.close, memory)
        os.ftruncate(memory, _NUM_SLOTS * _SLOT_BYTES)
    except (OSError, AttributeError):
        return None, -1
    return listener, memory


def _call(name: bytes | None, rank: int, memory: int) -> socket.socket:
    """Connect to another rank, and send it this rank and the descriptor of its slots."""
    with ExitStack() as on_error:
        peer = on_error.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(_CONNECT_S)
        peer.connect(name or b"")
        socket.send_fds(peer, [bytes([rank])], [memory])
        on_error.pop_all()
        return peer


def _accept(listener: socket.socket, resources: ExitStack) -> tuple[int, int, socket.socket]:
    """Accept the call of another rank, and return this rank, the descriptor of its slots and the connection."""
    size = struct.calcsize("3i")
    while True:
        with ExitStack() as on_error:
            peer = on_error.enter_context(listener.accept()[0])
            peer.settimeout(_CONNECT_S)
            _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            if user == os.getuid():
                rank, descriptor = _receive(peer, resources)
                on_error.pop_all()
                return rank, descriptor, peer


def _receive(peer: socket.socket, resources: ExitStack) -> tuple[int, int]:
    """Return the rank of a peer and the descriptor of its slots."""
    message, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
    resources.callback(os.close, descriptor)
    return message[0], descriptor


def _map(descriptor: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, _NUM_SLOTS * _SLOT_BYTES), dtype=torch.uint8)


def _is_true_on_all(flag: bool, handle: dist.ProcessGroup) -> bool:
    total = torch.tensor(float(flag), device="cpu")
    dist.all_reduce(total, dist.ReduceOp.MIN, group=handle)
    return bool(total.item())


def _close(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        peer.close()
