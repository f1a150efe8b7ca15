"""A group of ranks as a value; it has a communicator only if it has more than one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.flight_recorder import Channel, Entry, PendingWork

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class CollectiveCall:
    """One communication of this rank: operation, axes and size.

    ``num_bytes`` is the size of the full tensor: the input of an all-reduce or a reduce-scatter, the output of an
    all-gather, and otherwise the data that one rank sends. ``reduction`` is ``sum``, ``max`` and so on, or empty if
    nothing is reduced.
    """

    operation: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int
    reduction: str = ""


Observer = Callable[[CollectiveCall], None]
"""Callback that is called before every communication starts."""


@dataclass(frozen=True)
class NcclOptions:
    """Options of an NCCL communicator; None leaves NCCL's default.

    ``min_ctas`` and ``max_ctas`` bound the thread blocks of a collective, which take multiprocessors from GEMMs that
    run at the same time. ``cga_cluster_size`` is the number of thread blocks in a cluster, from Hopper on. Streams have
    a high priority with or without ``is_high_priority_stream``, which Megatron-LM's files may contain.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None
    is_high_priority_stream: bool = True

    @property
    def config(self) -> dict[str, int | str]:
        """Return the options that are set, by the names of NCCL's configuration."""
        names = ("min_ctas", "max_ctas", "cga_cluster_size", "net_name")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one slice of the rank grid.

    ``axes`` names the mesh axes that the group spans. ``ranks`` lists its global ranks in grid order, and ``rank`` is
    this process's index among them. ``handle`` is the communicator, or None if the group has one rank or describes a
    world without processes. ``observer`` is called for every communication over the group. ``flight`` records them for
    the flight recorder. If the group is split into two levels, ``levels`` are this rank's group of neighbors and the
    group of the ranks with the same index in the other groups. ``options`` are those of its NCCL communicators.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    observer: Observer | None = None
    levels: tuple[Group, Group] | None = None
    flight: Channel | None = None
    options: NcclOptions | None = None

    def observe(self, operation: str, num_bytes: int, reduction: str = "") -> None:
        """Notify the observer, if there is one, of a communication that is about to start."""
        if self.observer is not None:
            self.observer(CollectiveCall(operation, self.axes, self.size, num_bytes, reduction))

    def begin(
        self,
        operation: str,
        tensor: torch.Tensor | None = None,
        num_bytes: int = 0,
        pair: tuple[int, int] | None = None,
    ) -> Entry | None:
        """Record the start of a communication; return its entry for `end`, or None if nothing is recorded.

        A point-to-point communication, unknown to the rest of the group, is counted for this ``pair`` (sender,
        receiver).
        """
        flight = self.flight
        if flight is not None and pair is not None:
            flight = flight.recorder.channel(f"{self.name} {pair[0]}->{pair[1]}", pair)
        return None if flight is None else flight.begin(operation, tensor, num_bytes)

    def end(self, entry: Entry | None, work: PendingWork | None = None) -> PendingWork | None:
        """Record the end of a communication; if it is asynchronous, return a work whose ``wait`` records the end."""
        return work if entry is None or self.flight is None else self.flight.end(entry, work)

    def ensure_not_given_up(self) -> None:
        """Raise if an abort may have invalidated values; call it after reading values and before using them.

        Raises:
            GivenUpError: communication was given up.
        """
        if self.flight is not None:
            self.flight.recorder.ensure_not_given_up()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def name(self) -> str:
        """Return the axes joined, such as ``tp`` or ``dp_cp``, for messages."""
        return "_".join(self.axes)


def single_rank_group(axes: tuple[str, ...] = ("tp",), rank: int = 0) -> Group:
    """Return a group of one rank, over which every collective is a no-op."""
    return Group(axes=axes, ranks=(rank,), rank=0)
