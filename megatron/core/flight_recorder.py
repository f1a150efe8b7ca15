"""Flight recorder: a ring buffer with a rank's latest communications and its current position in the run.

A communication is described by words and numbers, so that it can be sent to other ranks and written to files.
Recording stores only a few references. Whatever costs time, such as line numbers and names, is computed on reading.
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
    """Be a communication that is under way."""

    def wait(self) -> object:
        """Wait until its tensors may be used."""
        ...


class DeviceMark(Protocol):
    """Be a place in the work that a device was given."""

    def query(self) -> bool:
        """Return whether the device has come past it; from any thread, and without a wait.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


@dataclass(frozen=True)
class Communication:
    """Describe one communication of a rank.

    ``channel`` names who communicates, equally on all of them, and ``sequence`` counts its communications from 1.
    ``seconds`` is how long it took, None where its end is not known (yet); ``age_s`` how long ago it began.
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
    """Return ranks in few characters: ``0,1``, or ``0-1016/8`` for each eighth from 0 to 1016."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def parse_ranks(channel: str) -> tuple[int, ...]:
    """Return the ranks that the name of a channel says."""
    text = channel.rpartition("[")[2].rstrip("]")
    if "-" not in text:
        return tuple(int(rank) for rank in text.split(","))
    ends, _, step = text.partition("/")
    first, _, last = ends.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


_CAPACITY = 1024
# The fields of an entry, a list: it is made for every communication, and an object would take twice as long.
_CHANNEL, _SEQUENCE, _OPERATION, _BYTES, _SHAPE, _CODE, _INSTRUCTION, _START, _END = range(9)
# What a device is asked by, where it is asked: marks before and behind, an old one for the second, and whether it goes
# on beside.
_REACHED, _PASSED, _SPARE, _IS_BESIDE = range(9, 13)
_NO_MARKS = (None, None, None, False)

_now = time.monotonic

Entry = list[Any]
"""One communication in the ring; `FlightRecorder.describe` says what is in it."""


class GivenUpError(RuntimeError):
    """Report that what a rank communicates has been given up: what was read from its device since is no result."""


class Channel:
    """Count and record the communications of some ranks over one communicator, on one of these ranks.

    ``name`` and ``ranks`` are the same on all of them, and so is the order of what they communicate.
    """

    __slots__ = ("_ring", "entered", "name", "ranks", "recorder")

    def __init__(self, recorder: FlightRecorder, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.entered = 0
        self.recorder = recorder
        self._ring = recorder.ring

    def begin(self, operation: str, tensor: torch.Tensor | None, num_bytes: int) -> Entry:
        """Record that a communication starts now, for a method that a function of another file has called.

        Its place is where that function, and whichever function of its file, was called from.
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
        """Record that a communication is over; one that goes on beside is not: then return what to wait for."""
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
    """Wait for a communication and record when that is over."""

    __slots__ = ("_entry", "_recorder", "_work")

    def __init__(self, work: PendingWork, entry: Entry, recorder: FlightRecorder) -> None:
        self._work = work
        self._entry = entry
        self._recorder = recorder

    def wait(self) -> object:
        recorder, begun = self._recorder, _now()
        recorder.blocked = self._entry
        result = self._work.wait()
        # No mark is needed behind what is over, and one would say less: the device may come to it much later.
        if self._entry[_REACHED] is not None and self.query():
            self._entry[_PASSED] = _OVER
        else:
            _mark_behind(self._entry, recorder)
            if recorder.mark is not None and self._entry[_REACHED] is not None and self._entry[_PASSED] is None:
                # Without a mark it is still asked for itself: what waits is recorded as a graph.
                self._entry[_PASSED] = self
        self._entry[_END] = now = _now()
        recorder.waited_s += now - begun
        recorder.num_ended += 1
        recorder.blocked = None
        return result

    def query(self) -> bool:
        """Return whether what goes on beside is known to be over."""
        is_completed: Callable[[], bool] | None = getattr(self._work, "is_completed", None)
        return is_completed is not None and is_completed()


class _Over:
    """Be the mark behind a communication that is known to be over."""

    def query(self) -> bool:
        return True


_OVER = _Over()


def _mark_behind(entry: Entry, recorder: FlightRecorder) -> None:
    """Put a mark behind a communication, where there is one before it: nobody asks for it otherwise.

    It takes the place of the work, whose tensors the ring must not keep.
    """
    if entry[_REACHED] is not None:
        spare, entry[_SPARE] = entry[_SPARE], None
        entry[_PASSED] = None if recorder.mark is None else recorder.mark(spare)


def _marks_taken_from(entry: Entry | None) -> tuple[DeviceMark | None, DeviceMark | None]:
    """Return the marks of an entry that leaves the ring, to be made again; who asks it now finds that it has none."""
    if entry is None:
        return None, None
    reached, passed, spare = entry[_REACHED], entry[_PASSED], entry[_SPARE]
    # Nor may it keep a work, and with it tensors, that is not waited for yet.
    entry[_REACHED] = entry[_PASSED] = entry[_SPARE] = None
    return reached, spare if passed is None or isinstance(passed, _RecordedWork | _Over) else passed


@dataclass(frozen=True)
class DeviceView:
    """Say how far a device has come with communications that the host has left to it.

    ``inside`` are those that it has reached and not got past, the oldest first, and so are ``beside``, which go on
    beside the computation: one that was waited for may be over long before the device comes past the wait. ``ahead`` is
    the oldest that it has not reached. ``entered`` counts those that it has reached, by channel.
    """

    inside: tuple[Entry, ...]
    beside: tuple[Entry, ...]
    ahead: Entry | None
    entered: Mapping[str, int]


@dataclass(eq=False)
class FlightRecorder:
    """Hold the latest communications of this rank, and what it is doing.

    ``blocked`` is the communication that it is in or waits for, ``waited_s`` all time that it was in one. ``phase`` is
    the last part of a run that began. ``reading`` has the samples that threads are reading, by the thread's number.
    ``longest_step_s`` falls slowly, so that one long iteration is forgotten. ``num_begun`` and ``num_ended`` count
    communications, ``ticks`` all else that got done. ``is_given_up`` says that the communicators are being aborted:
    what was under way ends without a result. ``mark`` makes a mark at the end of what the device has been given, by
    moving an old one where it is given that; it is there while somebody watches a device that the host does not wait
    for, and returns None where marks are not to be had just then.
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
        """Return the channel of this name among these ranks."""
        full_name = f"{name}[{format_ranks(ranks)}]"
        return self.channels.setdefault(full_name, Channel(self, full_name, ranks))

    @property
    def moves(self) -> int:
        return self.num_begun + self.num_ended + self.ticks

    def give_up(self) -> None:
        """Say that the communicators are going to be aborted; to be called before they are."""
        self.is_given_up = True

    def ensure_not_given_up(self) -> None:
        """Let nothing be decided by numbers that an abort has left; to be called when they have been read.

        Raises:
            GivenUpError: communication was given up.
        """
        if self.is_given_up:
            raise GivenUpError("communication was given up, since a rank was lost or hangs: what was read is no result")

    def enter(self, phase: str) -> None:
        """Say which part of the run begins."""
        self.phase = phase
        self.ticks += 1

    def tick(self) -> None:
        """Say that something has got done."""
        self.ticks += 1

    def end_iteration(self, iteration: int, seconds: float) -> None:
        """Say that an iteration is done; the first one's time says nothing of the next."""
        self.iteration = iteration
        if self.iterations_done:
            self.longest_step_s = max(seconds, 0.99 * self.longest_step_s)
        self.iterations_done += 1
        self.ticks += 1

    @contextmanager
    def reading_of(self, samples: Sequence[int]) -> Iterator[None]:
        """Say inside the context which samples this thread reads."""
        self.reading[threading.get_ident()] = samples
        try:
            yield
        finally:
            del self.reading[threading.get_ident()]

    def describe(self, entry: Entry) -> Communication:
        """Return what an entry says."""
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
        """Return how far the device has come, None where the host waits for every communication; waits for nothing.

        What has left the ring counts as passed.

        Raises:
            RuntimeError: the device has failed.
        """
        if self.mark is None:
            return None
        entries = self._in_order()
        # Behind the ring: each of its channels is there.
        entered = {name: channel.entered for name, channel in list(self.channels.items())}
        inside: list[Entry] = []
        beside: list[Entry] = []
        ahead = None
        for entry in entries:
            reached, passed = entry[_REACHED], entry[_PASSED]
            if reached is None or (passed is not None and passed.query()):
                continue
            is_reached = reached.query()
            if entry[_REACHED] is not reached:  # It has left the ring meanwhile, and the mark is another one's.
                continue
            if is_reached:
                (beside if entry[_IS_BESIDE] else inside).append(entry)
            else:
                ahead = ahead or entry
                name = entry[_CHANNEL].name
                entered[name] = min(entered[name], entry[_SEQUENCE] - 1)
        return DeviceView(tuple(inside), tuple(beside), ahead, entered)

    def latest(self) -> list[Communication]:
        """Return what is in the ring, the oldest first."""
        return [self.describe(entry) for entry in self._in_order()]

    def _in_order(self) -> list[Entry]:
        entries = [entry for entry in list(self.ring) if entry is not None]
        return sorted(entries, key=lambda entry: entry[_START])


def _line(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction by its offset in bytes."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
