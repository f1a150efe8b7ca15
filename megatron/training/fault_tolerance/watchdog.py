"""Watchdog of a rank: a thread that publishes the rank's state, detects hangs and ends a run that hangs.

All ranks post their states at every beat on the board of their node, whose speaker writes them into the store. The
first speaker reads all states and leads. If it falls silent, another speaker takes its place. If the run hangs, the
leader requests the stacks of all ranks, prints the report, and orders all ranks to end. The other ranks of a node kill
a rank that does not respond.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_objects, any_rank, broadcast_object
from megatron.core.console import print_line
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError, MegatronError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import ParallelState
from megatron.training import abort_communication, connect_store, is_first_failure, launcher_error_file
from megatron.training.fault_tolerance.hang_report import HANG_PREFIX, Diagnosis, HangReport, diagnose
from megatron.training.fault_tolerance.hang_timeout import Patience
from megatron.training.fault_tolerance.node_board import NodeBoard, enter, node_folder, processes_in
from megatron.training.fault_tolerance.processes import (
    UNKNOWN,
    ProcessName,
    is_at_an_end,
    is_silent_for_good,
    kill,
    state_of,
    this_process,
)
from megatron.training.fault_tolerance.rank_state import (
    RankState,
    StackFile,
    ask_for_stacks,
    blocked_in,
    device_state,
    full_answer,
)


@dataclass(frozen=True)
class Surroundings:
    """Context of a watchdog: its process and its run.

    ``names`` are the processes of this node's ranks, by rank. ``folder`` is for reports, ``error_file`` is the
    launcher's error file of this process, and ``stack_file`` gets this process's stacks if it cannot answer.
    ``count_failure`` reports the failure to the run, ``device`` describes the device, ``attend`` makes it current in a
    thread, ``abort`` aborts communication, and ``leave`` ends the process with a status.
    """

    rank: int
    num_ranks: int
    names: Mapping[int, ProcessName]
    folder: Path | None = None
    error_file: str = ""
    stack_file: str = ""
    count_failure: Callable[[], object] = lambda: None
    device: Callable[[], Mapping[str, Any]] = dict
    attend: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
    leave: Callable[[int], object] = os._exit

    @property
    def process(self) -> ProcessName:
        return self.names[self.rank]


_ENDING_S = 3.0
_POLL_S = 0.05


def end_ranks(word: Mapping[str, Any], around: Surroundings, leads: bool, beat_s: float) -> None:
    """End this process with status 1, and the processes of its node that cannot end themselves.

    ``word`` is the leader's order: the root-cause rank, its error file with the message for it, and the ranks to kill.
    The leader ends last, and kills the remaining processes of its node.
    """
    names = around.names
    if word["culprit"] in names:
        _explain(word["error_file"], word["message"], word["since"])
    for rank in word["kill"]:
        if rank in names:
            kill(names[rank])
    if leads:
        others = [name for rank, name in names.items() if rank != around.rank]
        deadline = time.monotonic() + _ENDING_S + beat_s
        while time.monotonic() < deadline and not all(is_at_an_end(state_of(name)) for name in others):
            time.sleep(_POLL_S)
        for name in others:
            kill(name)
    aborting = threading.Thread(target=around.abort, daemon=True)
    aborting.start()
    aborting.join(_ENDING_S)
    around.leave(1)


def _explain(error_file: str, message: str, since: float) -> None:
    """Write the reason to torchrun's error file; torchrun reports the process with the oldest reason."""
    if not error_file:
        return
    text = f"{HANG_PREFIX}{message}"
    reason = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(since))}}}
    try:
        Path(error_file).write_text(json.dumps(reason))
    except OSError:
        return


_ANSWER_S = 3.0
_LEADER_SILENCE_S = 5.0
_NODES_PER_BEAT_S = 128
_SHUTDOWN_S = 5.0
_COLLECT, _END, _OVER = "collect", "end", "over"


@dataclass
class _View:
    """The leader's view of a rank, and the time of its last report."""

    state: RankState
    heard: float


class Watchdog:
    """Watchdog of a run on one of its ranks, until it is closed."""

    def __init__(
        self,
        board: NodeBoard,
        recorder: FlightRecorder,
        patience: Patience,
        surroundings: Surroundings,
        beat_s: float = 1.0,
    ) -> None:
        self._board = board
        self._recorder = recorder
        self._patience = patience
        self._around = surroundings
        self._rank = surroundings.rank
        self._beat_s = max(beat_s, len(board.nodes) / _NODES_PER_BEAT_S)
        self._beat = 0
        self._leads = self._rank == 0
        self._word: dict[str, Any] = {"leader": 0, "beat": 0, "order": ""}
        self._word_heard = self._round_begun = time.monotonic()
        self._answered = ""
        self._views: dict[int, _View] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog{name}", daemon=True)
            for target, name in ((self._run, ""), (self._watch_store, " of the store"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self, is_over: bool = True) -> None:
        """Stop watching; if the run is not over for all ranks, the others continue and know that this rank has left."""
        self._closing.set()
        self._threads[0].join(2 * self._beat_s)
        if self._threads[0].is_alive():
            return
        try:
            self._publish_state(left=True)
            if is_over and self._leads:
                self._say(_OVER)
            self._board.close()
        except (RuntimeError, OSError):  # the store or the folder is gone, and the run has ended
            return

    def _run(self) -> None:
        try:
            self._around.attend()
            while not self._closing.wait(self._beat_s) and self._round():
                pass
        except (RuntimeError, OSError, MegatronError) as error:
            # At the end of a run, the store's process may end before this rank has closed its watchdog.
            if not self._closing.wait(_SHUTDOWN_S):
                self._warn(error)
        finally:
            self._closing.set()

    def _warn(self, error: Exception) -> None:
        """Warn that this rank no longer watches, and why."""
        reason = str(error).partition("\n")[0]
        text = f"WARNING: rank {self._rank} no longer monitors for hangs: {reason or type(error).__name__}"
        print_line(f"{text}; --distributed-timeout-minutes ends a hang without a report", sys.stderr)

    def _round(self) -> bool:
        """Publish this rank's state, follow the leader's orders, and lead if this rank is the leader."""
        now = time.monotonic()
        if now - self._round_begun > 5 * self._beat_s + 2.0:
            # This process, or all of them, were suspended, so earlier observations are invalid.
            self._patience.start_again()
            self._word_heard = now
            self._board.start_again(now)
            for view in self._views.values():
                view.heard = now
        self._round_begun = now
        self._publish_state()
        if self._leads:
            self._lead(now)
        elif not self._listen(now):
            return False
        if self._board.speaks and self._answered:
            self._board.forward_answers(self._answered)
        self._round_begun = time.monotonic()
        return True

    def _publish_state(self, left: bool = False) -> None:
        self._beat += 1
        recorder, idle_s = self._recorder, self._patience.idle_s()
        state = RankState(
            rank=self._rank,
            process=self._around.process,
            beat=self._beat,
            phase=recorder.phase,
            iteration=recorder.iteration,
            idle_s=idle_s,
            allowance_s=self._patience.allowance_s(),
            entered={name: channel.entered for name, channel in list(recorder.channels.items())},
            blocked=blocked_in(recorder),
            # The state of a device that makes progress is not needed.
            on_device=device_state(recorder) if idle_s > 2 * self._beat_s else None,
            left=left,
            error_file=self._around.error_file,
            stack_file=self._around.stack_file,
        )
        self._board.post_state(state.to_dict())
        if self._board.speaks:
            self._board.forward()

    def _say(self, order: str = "", **more: Any) -> None:
        """Announce this rank as the leader to all ranks, with an order."""
        self._word = {"leader": self._rank, "beat": self._word["beat"] + 1, "order": order, **more}
        self._board.say(self._word)

    def _answer(self) -> dict[str, Any]:
        return full_answer(self._recorder, self._around.device())

    def _listen(self, now: float) -> bool:
        """Receive the leader's order, or take over from a silent leader; return False at the end of the run."""
        word = self._board.hear(now, max(_LEADER_SILENCE_S, 5 * self._beat_s)) or self._word
        if word != self._word:
            self._word, self._word_heard = word, now
        if word["order"] == _OVER:
            return False
        if word["order"] == _END:
            self._end(word)
            return False
        if word["order"] == _COLLECT and word["number"] != self._answered:
            self._answered = word["number"]
            self._board.post_answer(self._answered, self._answer())
        silent_s = now - self._word_heard
        if self._board.speaks and silent_s > max(_LEADER_SILENCE_S, 5 * self._beat_s):
            self._leads = self._board.claim(f"{word['leader']}/{word['beat']}")
            self._word_heard = now
            if self._leads:
                self._look(now)
                self._views[word["leader"]].heard = now - silent_s
        return True

    def _look(self, now: float) -> None:
        """Read the states of all ranks."""
        for values in self._board.states():
            view = self._views.get(values["rank"])
            if view is None or values["beat"] != view.state.beat:
                self._views[values["rank"]] = _View(RankState.from_dict(values), now)
        for rank in range(self._around.num_ranks):
            if rank not in self._views:
                self._views[rank] = _View(RankState(rank, self._around.names.get(rank, UNKNOWN)), now)

    def _lead(self, now: float) -> None:
        """Check for a hang; if there is one, report it and end the run."""
        self._say()
        self._look(now)
        if self._find_hang(now) is None:
            return
        self._collect()
        # Ranks that were asked may have continued meanwhile.
        now = time.monotonic()
        self._look(now)
        diagnosis = self._find_hang(now)
        if diagnosis is not None and not self._closing.is_set():
            self._report(diagnosis, now)

    def _idle(self, now: float) -> dict[int, float]:
        """Return the time that each rank has made no progress: as it reported, plus the time since that report."""
        return {
            rank: view.state.idle_s + (now - view.heard if now - view.heard > 3 * self._beat_s else 0.0)
            for rank, view in self._views.items()
        }

    def _silent(self, now: float) -> set[int]:
        """Return the ranks that have been silent and, according to their node, will not respond any more."""
        return {
            rank
            for rank, view in self._views.items()
            if now - view.heard > 3 * self._beat_s
            and not view.state.left
            and is_silent_for_good(state_of(view.state.process))
        }

    def _find_hang(self, now: float) -> Diagnosis | None:
        """Return the diagnosis of a hang, or None if there is no hang."""
        idle, silent = self._idle(now), self._silent(now)
        limit = max(view.state.allowance_s for view in self._views.values())
        given_up = {rank for rank in silent if now - self._views[rank].heard > self._patience.silence_s}
        active = [rank for rank, view in self._views.items() if not view.state.left]
        if not given_up and not any(idle[rank] > limit for rank in active):
            return None
        found = diagnose({rank: view.state for rank, view in self._views.items()}, silent)
        blamed = [culprit.rank for culprit in found.culprits]
        if given_up.intersection(blamed):
            waiting = [other for culprit in found.culprits for other in culprit.waiting]
            patient_s = 0.5 * self._patience.silence_s
            return found if any(idle[other] > patient_s for other in waiting) or len(active) == len(silent) else None
        return found if all(idle[rank] > limit for rank in blamed if not self._views[rank].state.left) else None

    def _collect(self) -> None:
        """Ask all responsive ranks for their data."""
        number = f"{self._rank}.{self._word['beat']}"
        self._say(_COLLECT, number=number)
        # Orders and answers pass through the speakers, which check once per beat.
        deadline = time.monotonic() + _ANSWER_S + 3 * self._beat_s
        missing = {
            rank
            for rank, view in self._views.items()
            if rank != self._rank and not view.state.left and not is_silent_for_good(state_of(view.state.process))
        }
        answers: dict[int, Mapping[str, Any]] = {self._rank: self._answer()}
        while missing and time.monotonic() < deadline:
            self._board.forward_answers(number)
            # The board shows the ranks of this node that their speaker is alive.
            self._board.hear(time.monotonic(), _ANSWER_S)
            found = self._board.answers(number, {self._board.node_of[rank] for rank in missing})
            answers.update({rank: answer for rank, answer in found.items() if rank in missing})
            missing -= set(answers)
            time.sleep(0.1)
            self._round_begun = time.monotonic()
        for rank in sorted(missing):
            state = self._views[rank].state
            seen = ask_for_stacks(state.process, state.stack_file)
            if seen:
                answers[rank] = {"stacks": seen, "is_locked": True}
        self._answers = answers

    def _report(self, diagnosis: Diagnosis, now: float) -> None:
        states = {rank: view.state for rank, view in self._views.items()}
        report = HangReport(
            limit_s=max(state.allowance_s for state in states.values()),
            states=states,
            idle_s=self._idle(now),
            processes={rank: state_of(state.process) for rank, state in states.items()},
            answers=self._answers,
            diagnosis=diagnosis,
        )
        self._around.count_failure()
        self._print(report)
        first = diagnosis.culprits[0].rank
        heard = {rank for rank, answer in self._answers.items() if not answer.get("is_locked")}
        unheard = [rank for rank in states if rank not in heard and not states[rank].left]
        word = {
            "culprit": first,
            "error_file": states[first].error_file,
            "message": report.culprit_lines()[0],
            "since": time.time() - report.idle_s[first],
            "kill": unheard,
        }
        self._say(_END, **word)
        self._end(word)

    def _print(self, report: HangReport) -> None:
        path = None if self._around.folder is None else report.write(self._around.folder)
        print_line(report.to_text("" if path is None else str(path)), sys.stderr)

    def _end(self, word: Mapping[str, Any]) -> None:
        self._closing.set()
        end_ranks(word, self._around, self._leads, self._beat_s)

    def _watch_store(self) -> None:
        """Handle the case that the store itself does not respond because its process is stopped."""
        self._around.attend()
        while not self._closing.wait(self._beat_s):
            silent_s = time.monotonic() - self._round_begun
            owner = self._around.names.get(0)
            patient_s = self._patience.silence_s + _ANSWER_S + 2 * self._beat_s
            if owner is None or silent_s < patient_s or self._rank == 0:
                continue
            state = state_of(owner)
            if not is_silent_for_good(state):
                continue
            message = self._speak_alone(owner, silent_s)
            # The other ranks of this node do not use the store, and get the order from the board.
            order = {"order": _END, "culprit": 0, "error_file": "", "message": message, "kill": [0]}
            self._board.leave_word({**self._word, "leader": self._rank, "since": time.time() - silent_s, **order})
            kill(owner)
            self._around.leave(1)

    def _speak_alone(self, owner: ProcessName, silent_s: float) -> str:
        """Report without the store that its process does not respond; return the line of the report."""
        blocked = blocked_in(self._recorder)
        states = {
            0: RankState(0, owner, phase="unknown"),
            self._rank: RankState(
                self._rank,
                self._around.process,
                phase=self._recorder.phase,
                iteration=self._recorder.iteration,
                blocked=blocked,
                on_device=device_state(self._recorder),
                entered={name: channel.entered for name, channel in list(self._recorder.channels.items())},
            ),
        }
        report = HangReport(
            limit_s=self._patience.silence_s,
            states=states,
            idle_s={0: silent_s, self._rank: silent_s},
            processes={rank: state_of(state.process) for rank, state in states.items()},
            answers={self._rank: self._answer()},
            diagnosis=diagnose(states, (0,)),
        )
        self._print(report)
        return report.culprit_lines()[0]


_LONGEST_BEAT_S = 1.0
_BEATS = 10
# Phases that the timers of a run start; other timers lie within these.
_PHASES: Mapping[str, str] = {
    "model-and-optimizer-setup": "setup",
    "train/valid/test-data-iterators-setup": "setup",
    "load-checkpoint": "load",
    "forward-backward": "forward",
    "batch-generator": "data",
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "gradients",
    "optimizer": "optimizer",
    "evaluate": "evaluate",
    "save-checkpoint": "save",
}


def phase_marker(recorder: FlightRecorder, mark_phase: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """Return a function that gets the name of each started timer; ``mark_phase`` gets the phases."""

    def mark(timer: str) -> None:
        phase = _PHASES.get(timer)
        if phase is not None:
            recorder.enter(phase)
            if mark_phase is not None:
                mark_phase(phase)

    return mark


@contextmanager
def watching(
    recorder: FlightRecorder,
    state: ParallelState,
    device: Device,
    seconds: int | None,
    folder: str | None = None,
    settling: int = 1,
    leave_with: int = 1,
) -> Iterator[None]:
    """Watch this rank inside the context, on all ranks; a hang ends the process with the status ``leave_with``.

    ``seconds`` is ``--hang-timeout-seconds``; 0 disables the watchdog. Reports are written to ``folder``, and the first
    ``settling`` iterations may be long. If a node cannot reach the store, rank 0 warns that hangs are not detected.
    """
    if seconds == 0:
        yield
        return
    with closing(StackFile()) as stack_file:
        patience = Patience(recorder, seconds, settling, device.has_work_left)
        watchdog = _open(recorder, state, device, patience, folder, stack_file.path, leave_with)
        is_over = False
        if watchdog is not None:
            recorder.mark = device.marker()
        try:
            yield
            is_over = True
        finally:
            if watchdog is not None:
                watchdog.close(is_over)
                recorder.mark = None


def _open(
    recorder: FlightRecorder,
    state: ParallelState,
    device: Device,
    patience: Patience,
    folder: str | None,
    stack_file: str,
    leave_with: int,
) -> Watchdog | None:
    prefix = broadcast_object(uuid.uuid4().hex, state.world)
    folder_of_node = node_folder(prefix, this_process().machine)
    trouble = _trouble_of(partial(enter, folder_of_node, RankState(state.rank, this_process())))
    if _warns(trouble, state):
        return None
    # All ranks have written their states, so all ranks in this folder are on this node.
    names = processes_in(folder_of_node)
    first = torch.tensor([min(names)], device=device.torch_device)
    node_of = all_gather_first_dim(first, state.world).tolist()
    board = NodeBoard(state.rank, folder_of_node, node_of, prefix, connect_store)
    trouble = _trouble_of(board.open) if min(names) == state.rank else ""
    if _warns(trouble, state):
        board.remove()
        return None
    surroundings = Surroundings(
        rank=state.rank,
        num_ranks=state.world.size,
        names=names,
        folder=None if folder is None else Path(folder),
        error_file=launcher_error_file(),
        stack_file=stack_file,
        count_failure=is_first_failure if leave_with == 1 else lambda: None,
        device=lambda: _describe(device),
        attend=device.make_current,
        abort=partial(_give_up, recorder),
        leave=lambda status: os._exit(leave_with),
    )
    return Watchdog(board, recorder, patience, surroundings, min(_LONGEST_BEAT_S, patience.silence_s / _BEATS))


def _trouble_of(action: Callable[[], object]) -> str:
    """Return why an action of this rank fails, or an empty string."""
    try:
        action()
    except (ConfigurationError, OSError) as error:
        return str(error)
    return ""


def _warns(trouble: str, state: ParallelState) -> bool:
    """Return whether any rank has trouble, which rank 0 then prints; collective."""
    if not any_rank(bool(trouble), state.world):
        return False
    reports = [(rank, each) for rank, each in enumerate(all_gather_objects(trouble, state.world)) if each]
    if state.rank == 0:
        rank, reason = reports[0]
        print_line(
            f"WARNING: hangs are neither detected nor reported: rank {rank}: {reason}; only "
            "--distributed-timeout-minutes ends a hang",
            sys.stderr,
        )
    return True


def _give_up(recorder: FlightRecorder) -> None:
    recorder.give_up()
    abort_communication()


def _describe(device: Device) -> dict[str, Any]:
    """Return the state of a device, or the error of the query."""
    try:
        use = dataclasses.asdict(device.memory_use())
        return {"device": str(device.torch_device), "memory_mib": use, "queue": device.queue_state()}
    except (OSError, RuntimeError) as error:
        return {"device": str(device.torch_device), "error": str(error)}
