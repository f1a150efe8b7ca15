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
    """Return the last folders of a path, from the package's own on."""
    parts = Path(path).parts
    if "megatron" in parts:
        return str(Path(*parts[len(parts) - 1 - parts[::-1].index("megatron") :]))
    return str(Path(*parts[-3:])) if len(parts) > 3 else path


# No library that a training uses takes it; 0 where the system has no such signals.
_NUMBER = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else 0
_WAIT_S = 2.0
_SETTLED_S = 0.2
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFile:
    """Let this process write its stacks into a file of its own on a signal, while this is open."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile("w", prefix="megatron-stacks-", suffix=".txt")  # noqa: SIM115
        if _NUMBER:
            # What `unregister` goes back to: a signal that comes late must not end the process.
            signal.signal(_NUMBER, signal.SIG_IGN)
            faulthandler.register(_NUMBER, self._file, all_threads=True)

    @property
    def path(self) -> str:
        """Return the file; empty where there are no such signals."""
        return self._file.name if _NUMBER else ""

    def close(self) -> None:
        """Listen no more, and remove the file."""
        if _NUMBER:
            faulthandler.unregister(_NUMBER)
        self._file.close()


def ask_for_stacks(process: ProcessName, path: str) -> list[dict[str, Any]]:
    """Return the stacks of a process of this machine that runs but does not answer; none where it does not write."""
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
    """Return what `faulthandler` has written as `rank_state.stacks` would say it: the innermost frames last."""
    stacks = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        head, *lines = block.splitlines() or [""]
        frames = [match for match in map(_FRAME.match, lines) if match is not None]
        named = [f"{short_path(match[1])}:{match[2]} in {match[3]}" for match in reversed(frames)]
        if named:
            stacks.append({"thread": head.partition(" (most recent")[0], "frames": named})
    # The main thread is the last that faulthandler writes.
    return [{**stacks[-1], "thread": "MainThread"}, *stacks[:-1]] if stacks else []


_NUM_FRAMES = 40
_NUM_ENTRIES = 64
_NUM_SAMPLES = 32
_NUM_INSIDE = 128
# Where a thread that waits for another one is; the other one is then of interest.
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
    """Hold how far a rank's device has come with the communications that the host has left to it.

    ``inside`` are those that it has reached and not got past, and so are ``beside``, which go on beside the computation
    and may be over. ``ahead`` is the oldest that it has not reached. ``entered`` counts those that it has reached, by
    channel.
    """

    inside: tuple[Communication, ...]
    beside: tuple[Communication, ...]
    ahead: Communication | None
    entered: Mapping[str, int]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeviceState:
        """Read back what `dataclasses.asdict` makes of one."""
        ahead = None if values["ahead"] is None else Communication(**values["ahead"])
        inside, beside = (tuple(Communication(**each) for each in values[name]) for name in ("inside", "beside"))
        return cls(inside, beside, ahead, values["entered"])

    def has_more_than(self, communication: Communication) -> bool:
        """Return whether it is not done with all others that it was given."""
        given = (*self.inside, *self.beside, *(() if self.ahead is None else (self.ahead,)))
        one = communication.channel, communication.sequence
        return any((other.channel, other.sequence) != one for other in given)


@dataclasses.dataclass(frozen=True)
class RankState:
    """Hold where a rank stands; ``beat`` grows each time that it says so.

    ``idle_s`` is for how long nothing has got done, and ``allowance_s`` how long that may be in this phase.
    ``entered`` counts the communications that it has begun, by channel; where they are left to a device and nothing
    gets done, ``on_device`` says how far that has come. ``left`` says that it watches no more.
    ``error_file`` is where the launcher reads why a process failed; empty where it does not. ``stack_file`` is
    where the process writes its stacks where it cannot answer.
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
        """Return whether the process waits for its device, so that this says what it waits in.

        A host that is in a communication waits there for hosts only where the communicator is used for the first time,
        or where its device is done with all others: else the device takes no more work, of whatever kind comes next.
        """
        device = self.on_device
        if device is None or self.blocked is None:
            return device is not None
        return self.blocked.sequence > 1 and device.has_more_than(self.blocked)

    @property
    def may_wait_in(self) -> tuple[Communication, ...]:
        """Return the communications of which the process, or its device, waits in one: the likeliest first."""
        if self.is_held_by_device and self.on_device is not None:
            return (*self.on_device.inside, *self.on_device.beside)
        return () if self.blocked is None else (self.blocked,)

    def num_entered(self, channel: str, by_device: bool) -> int:
        """Return how many communications of a channel it has begun, or with ``by_device`` its device (if any)."""
        counts = self.on_device.entered if by_device and self.on_device is not None else self.entered
        return counts.get(channel, 0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankState:
        """Read back what `to_dict` returned; other keys are left alone."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        known["process"] = ProcessName(**known["process"])
        if known.get("blocked") is not None:
            known["blocked"] = Communication(**known["blocked"])
        if known.get("on_device") is not None:
            known["on_device"] = DeviceState.from_dict(known["on_device"])
        return cls(**known)


def blocked_in(recorder: FlightRecorder) -> Communication | None:
    """Return the communication that this rank is in, or None where it is in none."""
    entry = recorder.blocked
    return None if entry is None else recorder.describe(entry)


def device_state(recorder: FlightRecorder) -> DeviceState | None:
    """Return how far this rank's device has come; None where the host waits for all, or the device has failed."""
    try:
        view = recorder.on_device()
    except RuntimeError:  # The report has what it failed with, as the state of its queue.
        return None
    if view is None:
        return None
    ahead = None if view.ahead is None else recorder.describe(view.ahead)
    inside, beside = (
        tuple(recorder.describe(entry) for entry in entries[:_NUM_INSIDE]) for entries in (view.inside, view.beside)
    )
    return DeviceState(inside, beside, ahead, view.entered)


def full_answer(recorder: FlightRecorder, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank knows of a hang: the stacks of its threads, its last communications and what it reads."""
    return {
        "stacks": stacks(),
        "reading": [[int(sample) for sample in samples][:_NUM_SAMPLES] for samples in [*recorder.reading.values()]],
        "latest": [dataclasses.asdict(entry) for entry in recorder.latest()[-_NUM_ENTRIES:]],
        "device": dict(device),
    }


def stacks() -> list[dict[str, Any]]:
    """Return the frames of every thread but this one, the innermost last, as ``FILE:LINE in FUNCTION``."""
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
    """Return where a rank is in the code, or its threads that the main one waits for; "" where it has not said."""
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
    """Return whether a thread waits for another one, or for something to do."""
    file: str = stack["frames"][-1].partition(" in ")[0].rpartition(":")[0]
    return file.endswith(_WAITING_FILES)
