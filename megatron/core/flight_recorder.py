"""Flight recorder: a ring buffer with a rank's latest communications and its current position in the run.

Entries contain only text and numbers, so that they can be sent to other ranks and written to files. Recording stores
only a few references. Expensive lookups, such as line numbers and names, are deferred until an entry is read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class PendingWork(Protocol):
    """Communication in flight."""

    def wait(self) -> object:
        """Wait until the tensors of the communication may be used."""
        ...


class DeviceMark(Protocol):
    """Marker in the queue of work that was launched on a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has passed the marker; callable from any thread, and does not wait.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


@dataclass(frozen=True)
class Communication:
    """Record of one communication of a rank.

    ``channel`` names the communicating ranks, identically on all of them, and ``sequence`` counts its communications
    from 1. ``seconds`` is the duration, or None if the end is unknown or still to come. ``age_s`` is the time since the
    start.
    """

    channel: str
    sequence: int
    operation: str
    num_bytes: int
    shape: tuple[int, ...]
    place: str
    age_s: float
    seconds: float | None


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Format ranks compactly: ``0,1``, or ``0-1016/8`` for every eighth rank from 0 to 1016."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def parse_ranks(channel: str) -> tuple[int, ...]:
    """Return the ranks in the name of a channel."""
    text = channel.rpartition("[")[2].rstrip("]")
    if "-" not in text:
        return tuple(int(rank) for rank in text.split(","))
    ends, _, step = text.partition("/")
    first, _, last = ends.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


_CAPACITY = 1024
# Fields of an entry. An entry is a list because one is created per communication, and an object would take twice as
# long.
_CHANNEL, _SEQUENCE, _OPERATION, _BYTES, _SHAPE, _CODE, _INSTRUCTION, _START, _END = range(9)
# Fields for watching the device: the markers before and after the communication, an old marker to reuse for the second,
# and whether the communication is asynchronous.
_REACHED, _PASSED, _SPARE, _IS_BESIDE = range(9, 13)
_NO_MARKS = (None, None, None, False)

_now = time.monotonic

Entry = list[Any]
"""One communication in the ring; `FlightRecorder.describe` decodes it."""


class GivenUpError(RuntimeError):
    """Communication was given up, so values read from the device since then are invalid."""


class Channel:
    """Counter and recorder of the communications of a set of ranks over one communicator.

    ``name`` and ``ranks`` are the same on all of these ranks, and so is the order of their communications.
    """

    __slots__ = ("_ring", "entered", "name", "ranks", "recorder")

    def __init__(self, recorder: FlightRecorder, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.entered = 0
        self.recorder = recorder
        self._ring = recorder.ring

    def begin(self, operation: str, tensor: torch.Tensor | None, num_bytes: int) -> Entry:
        """Record the start of a communication; called by a method that a function of another file calls.

        The recorded place is the innermost caller outside of the file of that function.
        """
        recorder = self.recorder
        self.entered = sequence = self.entered + 1
        function = sys._getframe(2)
        file, caller = function.f_code.co_filename, function.f_back
        while caller is not None and caller.f_code.co_filename == file:
            caller = caller.f_back
        caller = caller or function
        shape = None if tensor is None else tensor.shape
        entry: Entry = [
            self,
            sequence,
            operation,
            num_bytes,
            shape,
            caller.f_code,
            caller.f_lasti,
            _now(),
            None,
            *_NO_MARKS,
        ]
        recorder.num_begun = count = recorder.num_begun + 1
        if recorder.mark is not None:
            old, entry[_SPARE] = _marks_taken_from(self._ring[count % _CAPACITY])
            entry[_REACHED] = recorder.mark(old)
        self._ring[count % _CAPACITY] = recorder.blocked = entry
        return entry

    def end(self, entry: Entry, work: PendingWork | None = None) -> PendingWork | None:
        """Record the end of a communication; if it is asynchronous, return a work whose ``wait`` records the end."""
        recorder = self.recorder
        recorder.blocked = None
        if work is not None:
            recorded = _RecordedWork(work, entry, recorder)
            if entry[_REACHED] is not None:
                entry[_PASSED], entry[_IS_BESIDE] = recorded, True
            return recorded
        _mark_behind(entry, recorder)
        entry[_END] = now = _now()
        recorder.waited_s += now - entry[_START]
        recorder.num_ended += 1
        return None


class _RecordedWork:
    """Handle that waits for a communication and records its end."""

    __slots__ = ("_entry", "_recorder", "_work")

    def __init__(self, work: PendingWork, entry: Entry, recorder: FlightRecorder) -> None:
        self._work = work
        self._entry = entry
        self._recorder = recorder

    def wait(self) -> object:
        recorder, begun = self._recorder, _now()
        recorder.blocked = self._entry
        result = self._work.wait()
        # A finished communication needs no marker, and a marker would be less precise: the device may pass it much
        # later.
        if self._entry[_REACHED] is not None and self.query():
            self._entry[_PASSED] = _OVER
        else:
            _mark_behind(self._entry, recorder)
            if recorder.mark is not None and self._entry[_REACHED] is not None and self._entry[_PASSED] is None:
                # Without a marker (during graph capture) the device's progress is queried from the work itself.
                self._entry[_PASSED] = self
        self._entry[_END] = now = _now()
        recorder.waited_s += now - begun
        recorder.num_ended += 1
        recorder.blocked = None
        return result

    def query(self) -> bool:
        """Return whether the asynchronous communication is known to be finished."""
        is_completed: Callable[[], bool] | None = getattr(self._work, "is_completed", None)
        return is_completed is not None and is_completed()


class _Over:
    """Marker of a communication that is known to be finished."""

    def query(self) -> bool:
        return True


_OVER = _Over()


def _mark_behind(entry: Entry, recorder: FlightRecorder) -> None:
    """Set the marker after a communication, if it has a marker before it; otherwise it is not watched.

    The marker replaces the work, because the ring must not keep the work's tensors alive.
    """
    if entry[_REACHED] is not None:
        spare, entry[_SPARE] = entry[_SPARE], None
        entry[_PASSED] = None if recorder.mark is None else recorder.mark(spare)


def _marks_taken_from(entry: Entry | None) -> tuple[DeviceMark | None, DeviceMark | None]:
    """Return the markers of an entry that leaves the ring, for reuse, and clear them in the entry for its readers."""
    if entry is None:
        return None, None
    reached, passed, spare = entry[_REACHED], entry[_PASSED], entry[_SPARE]
    # Nor may the entry keep a pending work, and with it tensors, alive.
    entry[_REACHED] = entry[_PASSED] = entry[_SPARE] = None
    return reached, spare if passed is None or isinstance(passed, _RecordedWork | _Over) else passed


@dataclass(frozen=True)
class DeviceView:
    """Progress of a device through communications that the host does not wait for.

    ``inside`` are the communications that the device has reached and not passed, oldest first. ``beside`` are those of
    them that run concurrently with the computation: one that was waited for may finish long before the device passes
    the wait. ``ahead`` is the oldest communication that the device has not reached. ``entered`` counts the reached
    communications by channel.
    """

    inside: tuple[Entry, ...]
    beside: tuple[Entry, ...]
    ahead: Entry | None
    entered: Mapping[str, int]


@dataclass(eq=False)
class FlightRecorder:
    """Latest communications of this rank and its current position in the run.

    ``blocked`` is the communication that the rank is in or waits for, and ``waited_s`` the total time spent in
    communications. ``phase`` is the last part of a run that started. ``reading`` maps thread ids to the samples that
    the threads are reading. ``longest_step_s`` decays slowly, so that a single long iteration is forgotten.
    ``num_begun`` and ``num_ended`` count communications, and ``ticks`` all other progress. ``is_given_up`` says that
    the communicators are being aborted, so that pending communications end without a result. ``mark`` sets a marker at
    the end of the work launched on the device, and reuses an old marker if given one. It is set only while a watchdog
    observes a device that the host does not wait for, and returns None if markers are not possible at that moment.
    """

    phase: str = "setup"
    iteration: int = 0
    iterations_done: int = 0
    longest_step_s: float = 0.0
    num_begun: int = 0
    num_ended: int = 0
    ticks: int = 0
    waited_s: float = 0.0
    blocked: Entry | None = None
    is_given_up: bool = False
    reading: dict[int, Sequence[int]] = field(default_factory=dict)
    ring: list[Entry | None] = field(default_factory=lambda: [None] * _CAPACITY)
    channels: dict[str, Channel] = field(default_factory=dict)
    mark: Callable[[DeviceMark | None], DeviceMark | None] | None = None

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """Return the channel of this name and these ranks, creating it on first use."""
        full_name = f"{name}[{format_ranks(ranks)}]"
        return self.channels.setdefault(full_name, Channel(self, full_name, ranks))

    @property
    def moves(self) -> int:
        return self.num_begun + self.num_ended + self.ticks

    def give_up(self) -> None:
        """Announce that the communicators will be aborted; call it before aborting them."""
        self.is_given_up = True

    def ensure_not_given_up(self) -> None:
        """Raise if an abort may have invalidated values; call it after reading values and before using them.

        Raises:
            GivenUpError: communication was given up.
        """
        if self.is_given_up:
            raise GivenUpError(
                "communication was aborted because a rank was lost or hangs; the received data is incomplete"
            )

    def enter(self, phase: str) -> None:
        """Record the part of the run that starts."""
        self.phase = phase
        self.ticks += 1

    def tick(self) -> None:
        """Record progress."""
        self.ticks += 1

    def end_iteration(self, iteration: int, seconds: float) -> None:
        """Record the end of an iteration; the first iteration's duration is ignored, as it is not representative."""
        self.iteration = iteration
        if self.iterations_done:
            self.longest_step_s = max(seconds, 0.99 * self.longest_step_s)
        self.iterations_done += 1
        self.ticks += 1

    @contextmanager
    def reading_of(self, samples: Sequence[int]) -> Iterator[None]:
        """Record which samples this thread reads inside the context."""
        self.reading[threading.get_ident()] = samples
        try:
            yield
        finally:
            del self.reading[threading.get_ident()]

    def describe(self, entry: Entry) -> Communication:
        """Decode an entry of the ring."""
        end = entry[_END]
        return Communication(
            channel=entry[_CHANNEL].name,
            sequence=entry[_SEQUENCE],
            operation=entry[_OPERATION],
            num_bytes=entry[_BYTES],
            shape=tuple(entry[_SHAPE] or ()),
            place=f"{entry[_CODE].co_filename}:{_line(entry[_CODE], entry[_INSTRUCTION])}",
            age_s=_now() - entry[_START],
            seconds=None if end is None else end - entry[_START],
        )

    def on_device(self) -> DeviceView | None:
        """Return the device's progress without waiting, or None if the host waits for every communication.

        Communications that have left the ring count as passed.

        Raises:
            RuntimeError: the device has failed.
        """
        if self.mark is None:
            return None
        entries = self._in_order()
        # Read after the ring, so that the channel of every entry is present.
        entered = {name: channel.entered for name, channel in list(self.channels.items())}
        inside: list[Entry] = []
        beside: list[Entry] = []
        ahead = None
        for entry in entries:
            reached, passed = entry[_REACHED], entry[_PASSED]
            if reached is None or (passed is not None and passed.query()):
                continue
            is_reached = reached.query()
            if entry[_REACHED] is not reached:  # The entry has left the ring meanwhile, and its marker was reused.
                continue
            if is_reached:
                (beside if entry[_IS_BESIDE] else inside).append(entry)
            else:
                ahead = ahead or entry
                name = entry[_CHANNEL].name
                entered[name] = min(entered[name], entry[_SEQUENCE] - 1)
        return DeviceView(tuple(inside), tuple(beside), ahead, entered)

    def latest(self) -> list[Communication]:
        """Return the recorded communications, oldest first."""
        return [self.describe(entry) for entry in self._in_order()]

    def _in_order(self) -> list[Entry]:
        entries = [entry for entry in list(self.ring) if entry is not None]
        return sorted(entries, key=lambda entry: entry[_START])


def _line(code: CodeType, instruction: int) -> int:
    """Return the source line of an instruction from its byte offset."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
