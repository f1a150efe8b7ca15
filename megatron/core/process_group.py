"""A group of ranks, described as a value; communicators are attached only where the group has more than one rank."""

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
    """Describe one communication of this rank: what it does, over which axes, and how much.

    ``num_bytes`` is the size of the whole tensor that the operation is about: what every rank holds before an
    all-reduce or a reduce-scatter and after an all-gather, and what one rank sends otherwise. ``reduction`` is ``sum``,
    ``max`` and the like, and empty where nothing is reduced.
    """

    operation: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int
    reduction: str = ""


Observer = Callable[[CollectiveCall], None]
"""Is told of every communication before it starts."""


@dataclass(frozen=True, eq=False)
class Group:
    """Hold the ranks that share one slice of the grid of ranks.

    ``axes`` names the mesh axes that the group spans, ``ranks`` lists its global ranks in grid order, ``rank`` is
    this process's place among them, and ``handle`` is the communicator: ``None`` when the group has one rank, or when
    the group only describes a world without processes. ``observer`` is told of every communication over the group.
    ``flight`` records them, where somebody may ask for what a rank waits.
    ``levels`` are, where it is cut in two, this rank's group of neighbors and that of those in its place elsewhere.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    observer: Observer | None = None
    levels: tuple[Group, Group] | None = None
    flight: Channel | None = None

    def observe(self, operation: str, num_bytes: int, reduction: str = "") -> None:
        """Tell the observer, if there is one, of a communication that is about to start."""
        if self.observer is not None:
            self.observer(CollectiveCall(operation, self.axes, self.size, num_bytes, reduction))

    def begin(
        self,
        operation: str,
        tensor: torch.Tensor | None = None,
        num_bytes: int = 0,
        pair: tuple[int, int] | None = None,
    ) -> Entry | None:
        """Record a communication that starts now; return what says so when it is over, None where nobody records.

        One from a rank to another, of which the rest of the group knows nothing, is counted for this ``pair``.
        """
        flight = self.flight
        if flight is not None and pair is not None:
            flight = flight.recorder.channel(f"{self.name} {pair[0]}->{pair[1]}", pair)
        return None if flight is None else flight.begin(operation, tensor, num_bytes)

    def end(self, entry: Entry | None, work: PendingWork | None = None) -> PendingWork | None:
        """Record that a communication is over or, where it goes on beside as ``work``, return what to wait for."""
        return work if entry is None or self.flight is None else self.flight.end(entry, work)

    def ensure_not_given_up(self) -> None:
        """Let nothing be decided by numbers that the group's abort has left; to be called when they have been read.

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
    """Return a group of one rank, over which every collective returns at once."""
    return Group(axes=axes, ranks=(rank,), rank=0)
