"""State of a rank for hang detection: its current operation, device and Python stacks."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.flight_recorder import Communication, FlightRecorder
from megatron.training.fault_tolerance.processes import ProcessName, state_of


def short_path(path: str) -> str:
    """Shorten a path to the part from the package's folder on, or to its last components."""
    parts = Path(path).parts
    if "megatron" in parts:
        return str(Path(*parts[len(parts) - 1 - parts[::-1].index("megatron") :]))
    return str(Path(*parts[-3:])) if len(parts) > 3 else path


# A signal that no library used in training takes; 0 if the system has no such signals.
_NUMBER = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else 0
_WAIT_S = 2.0
_SETTLED_S = 0.2
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFile:
    """File into which this process writes its stacks on a signal, until it is closed."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile("w", prefix="megatron-stacks-", suffix=".txt")  # noqa: SIM115
        if _NUMBER:
            # `unregister` restores this handler, so that a late signal does not end the process.
            signal.signal(_NUMBER, signal.SIG_IGN)
            faulthandler.register(_NUMBER, self._file, all_threads=True)

    @property
    def path(self) -> str:
        """Return the file, or an empty string if there are no such signals."""
        return self._file.name if _NUMBER else ""

    def close(self) -> None:
        """Stop handling the signal, and remove the file."""
        if _NUMBER:
            faulthandler.unregister(_NUMBER)
        self._file.close()


def ask_for_stacks(process: ProcessName, path: str) -> list[dict[str, Any]]:
    """Request the stacks of a process of this node that runs but does not answer; empty if it does not write them."""
    file = Path(path)
    if not path or state_of(process) != "alive" or not file.is_file():
        return []
    deadline = time.monotonic() + _WAIT_S
    text = ""
    try:
        os.kill(process.pid, _NUMBER)
        while time.monotonic() < deadline:
            time.sleep(_SETTLED_S)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                break
    except OSError:
        return []
    return parse_stacks(text)


def parse_stacks(text: str) -> list[dict[str, Any]]:
    """Parse the output of `faulthandler` into the format of `rank_state.stacks`: the innermost frames last."""
    stacks = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        head, *lines = block.splitlines() or [""]
        frames = [match for match in map(_FRAME.match, lines) if match is not None]
        named = [f"{short_path(match[1])}:{match[2]} in {match[3]}" for match in reversed(frames)]
        if named:
            stacks.append({"thread": head.partition(" (most recent")[0], "frames": named})
    # faulthandler writes the main thread last.
    return [{**stacks[-1], "thread": "MainThread"}, *stacks[:-1]] if stacks else []


_NUM_FRAMES = 40
_NUM_ENTRIES = 64
_NUM_SAMPLES = 32
_NUM_INSIDE = 128
# Files in which a thread waits for another one; the other thread is then of interest.
_WAITING_FILES = (
    "threading.py",
    "queue.py",
    "concurrent/futures/_base.py",
    "concurrent/futures/thread.py",
    "selectors.py",
    "socket.py",
    "training/dist_signal_handler.py",
)


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """Progress of a rank's device through the communications that the host has enqueued.

    ``inside`` are those that the device has reached and not completed. So are ``beside``, which overlap with the
    computation and may be over. ``ahead`` is the oldest one that it has not reached. ``entered`` counts those that it
    has reached, by channel.
    """

    inside: tuple[Communication, ...]
    beside: tuple[Communication, ...]
    ahead: Communication | None
    entered: Mapping[str, int]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeviceState:
        """Read a state from the output of `dataclasses.asdict`."""
        ahead = None if values["ahead"] is None else Communication(**values["ahead"])
        inside, beside = (tuple(Communication(**each) for each in values[name]) for name in ("inside", "beside"))
        return cls(inside, beside, ahead, values["entered"])

    def has_more_than(self, communication: Communication) -> bool:
        """Return whether the device has other uncompleted communications."""
        given = (*self.inside, *self.beside, *(() if self.ahead is None else (self.ahead,)))
        one = communication.channel, communication.sequence
        return any((other.channel, other.sequence) != one for other in given)


@dataclasses.dataclass(frozen=True)
class RankState:
    """State of a rank; ``beat`` grows with each report.

    ``idle_s`` is the time without progress, and ``allowance_s`` its limit in this phase. ``entered`` counts the
    communications that the rank has started, by channel. If they are enqueued on a device and there is no progress,
    ``on_device`` is the device's state. ``left`` means that the rank has stopped monitoring. ``error_file`` is the
    launcher's error file of the process, or empty without one. ``stack_file`` is the file for the process's stacks if
    it cannot answer.
    """

    rank: int
    process: ProcessName
    beat: int = 0
    phase: str = ""
    iteration: int = 0
    idle_s: float = 0.0
    allowance_s: float = 0.0
    entered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    blocked: Communication | None = None
    on_device: DeviceState | None = None
    left: bool = False
    error_file: str = ""
    stack_file: str = ""

    @property
    def is_held_by_device(self) -> bool:
        """Return whether the process waits for its device, so that the device's state shows what it waits in.

        A host in a communication waits for other hosts only on the first use of the communicator, or if its device has
        completed all others. Otherwise the device's queue is full, whatever the next operation is.
        """
        device = self.on_device
        if device is None or self.blocked is None:
            return device is not None
        return self.blocked.sequence > 1 and device.has_more_than(self.blocked)

    @property
    def may_wait_in(self) -> tuple[Communication, ...]:
        """Return the communications that the process or its device may wait in, the most likely first."""
        if self.is_held_by_device and self.on_device is not None:
            return (*self.on_device.inside, *self.on_device.beside)
        return () if self.blocked is None else (self.blocked,)

    def num_entered(self, channel: str, by_device: bool) -> int:
        """Return how many communications of a channel were started, by the rank or ``by_device`` by its device."""
        counts = self.on_device.entered if by_device and self.on_device is not None else self.entered
        return counts.get(channel, 0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankState:
        """Read a state from the output of `to_dict`; other keys are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        known["process"] = ProcessName(**known["process"])
        if known.get("blocked") is not None:
            known["blocked"] = Communication(**known["blocked"])
        if known.get("on_device") is not None:
            known["on_device"] = DeviceState.from_dict(known["on_device"])
        return cls(**known)


def blocked_in(recorder: FlightRecorder) -> Communication | None:
    """Return the communication that this rank is in, or None."""
    entry = recorder.blocked
    return None if entry is None else recorder.describe(entry)


def device_state(recorder: FlightRecorder) -> DeviceState | None:
    """Return the device's state; None if the host waits for all communication, or the device has failed."""
    try:
        view = recorder.on_device()
    except RuntimeError:  # The report includes the error, as the state of the device's queue.
        return None
    if view is None:
        return None
    ahead = None if view.ahead is None else recorder.describe(view.ahead)
    inside, beside = (
        tuple(recorder.describe(entry) for entry in entries[:_NUM_INSIDE]) for entries in (view.inside, view.beside)
    )
    return DeviceState(inside, beside, ahead, view.entered)


def full_answer(recorder: FlightRecorder, device: Mapping[str, Any]) -> dict[str, Any]:
    """Collect a rank's data for a hang report: stacks of its threads, last communications and samples read."""
    return {
        "stacks": stacks(),
        "reading": [[int(sample) for sample in samples][:_NUM_SAMPLES] for samples in [*recorder.reading.values()]],
        "latest": [dataclasses.asdict(entry) for entry in recorder.latest()[-_NUM_ENTRIES:]],
        "device": dict(device),
    }


def stacks() -> list[dict[str, Any]]:
    """Return the frames of every thread except this one, the innermost last, as ``FILE:LINE in FUNCTION``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            summary = traceback.extract_stack(frame, _NUM_FRAMES)
            frames = [f"{short_path(line.filename)}:{line.lineno} in {line.name}" for line in summary]
            found.append({"thread": names.get(ident, str(ident)), "frames": frames})
    return sorted(found, key=lambda stack: stack["thread"] != "MainThread")


def at_work(answer: Mapping[str, Any]) -> str:
    """Return a rank's position in the code, or that of threads its main thread waits for; empty if unknown."""
    all_stacks = [stack for stack in answer.get("stacks", ()) if stack["frames"]]
    if not all_stacks:
        return ""
    main, others = all_stacks[0], all_stacks[1:]
    if is_waiting(main):
        busy = [stack for stack in others if not is_waiting(stack)]
        if busy:
            return "; ".join(f"{stack['frames'][-1]} (thread {stack['thread']})" for stack in busy)
    return str(main["frames"][-1])


def is_waiting(stack: Mapping[str, Any]) -> bool:
    """Return whether a thread waits for another one, or for work."""
    file: str = stack["frames"][-1].partition(" in ")[0].rpartition(":")[0]
    return file.endswith(_WAITING_FILES)
