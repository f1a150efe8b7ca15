"""The watchdog of a rank: a thread that says where the rank stands, and on one of them looks whether anybody hangs.

All ranks write their states into the store at every beat. One of them, the first, reads all and leads; where it falls
silent another takes its place. Where the run hangs it asks all for their stacks, prints the report, and tells all to
end. A rank that cannot hear is killed by the others of its machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.flight.recorder import FlightRecorder
from megatron.training.process.console import print_line
from megatron.training.process.hang.diagnosis import Diagnosis, diagnose
from megatron.training.process.hang.ending import end_ranks
from megatron.training.process.hang.hang_report import HangReport
from megatron.training.process.hang.locked_stacks import ask_for_stacks
from megatron.training.process.hang.patience import Patience
from megatron.training.process.hang.processes import ProcessName, is_silent_for_good, kill, state_of
from megatron.training.process.hang.rank_state import RankState, blocked_in, device_state, full_answer
from megatron.training.process.hang.surroundings import Store, Surroundings

_ANSWER_S = 3.0
_LEADER_SILENCE_S = 5.0
_RANKS_PER_BEAT_S = 256
_COLLECT, _END, _OVER = "collect", "end", "over"


@dataclass
class _View:
    """Hold what the leader has seen of a rank, and when it last said anything."""

    state: RankState
    heard: float


class Watchdog:
    """Watch a run from one of its ranks until it is closed."""

    def __init__(
        self,
        store: Store,
        recorder: FlightRecorder,
        patience: Patience,
        surroundings: Surroundings,
        beat_s: float = 1.0,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._patience = patience
        self._around = surroundings
        self._rank = surroundings.rank
        self._beat_s = max(beat_s, len(surroundings.names) / _RANKS_PER_BEAT_S)
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
        """Watch no more; where the run is not over for all, the others go on and know that this rank has left."""
        self._closing.set()
        self._threads[0].join(2 * self._beat_s)
        if self._threads[0].is_alive():
            return
        try:
            self._publish_state(left=True)
            if self._leads and is_over:
                self._say(_OVER)
        except RuntimeError:
            return

    def _key(self, name: str) -> str:
        return f"megatron/hang/{self._around.prefix}/{name}"

    def _run(self) -> None:
        try:
            self._around.attend()
            while not self._closing.wait(self._beat_s) and self._round():
                pass
        except RuntimeError:  # the store is gone, and the run with it
            return
        finally:
            self._closing.set()

    def _round(self) -> bool:
        """Say where this rank stands, do what the leader says, and lead where this is the leader."""
        now = time.monotonic()
        if now - self._round_begun > 5 * self._beat_s + 2.0:
            # This process, or all of them, did not run: what was seen before says nothing.
            self._patience.start_again()
            self._word_heard = now
            for view in self._views.values():
                view.heard = now
        self._round_begun = now
        self._publish_state()
        if self._leads:
            self._lead(now)
        elif not self._listen(now):
            return False
        self._round_begun = time.monotonic()
        return True

    def _publish_state(self, left: bool = False) -> None:
        self._beat += 1
        recorder, idle_s = self._recorder, self._patience.idle_s()
        state = RankState(
            rank=self._rank,
            process=self._around.names[self._rank],
            beat=self._beat,
            phase=recorder.phase,
            iteration=recorder.iteration,
            idle_s=idle_s,
            allowance_s=self._patience.allowance_s(),
            entered={name: channel.entered for name, channel in list(recorder.channels.items())},
            blocked=blocked_in(recorder),
            # A device that gets on is not asked.
            on_device=device_state(recorder) if idle_s > 2 * self._beat_s else None,
            left=left,
            error_file=self._around.error_file,
            stack_file=self._around.stack_file,
        )
        self._store.set(self._key(f"state/{self._rank}"), json.dumps(state.to_dict()))

    def _say(self, order: str = "", **more: Any) -> None:
        """Tell all ranks that this one leads, and what to do."""
        self._word = {"leader": self._rank, "beat": self._word["beat"] + 1, "order": order, **more}
        self._store.set(self._key("word"), json.dumps(self._word))

    def _answer(self) -> dict[str, Any]:
        return full_answer(self._recorder, self._around.device())

    def _listen(self, now: float) -> bool:
        """Hear the leader, and take its place where it has said nothing for long; return whether to go on."""
        has_word = self._store.check([self._key("word")])
        word = json.loads(self._store.get(self._key("word"))) if has_word else self._word
        if word != self._word:
            self._word, self._word_heard = word, now
        if word["order"] == _OVER:
            return False
        if word["order"] == _END:
            self._end(word)
            return False
        if word["order"] == _COLLECT and word["number"] != self._answered:
            self._answered = word["number"]
            self._store.set(self._key(f"answer/{self._answered}/{self._rank}"), json.dumps(self._answer()))
        silent_s = now - self._word_heard
        if silent_s > max(_LEADER_SILENCE_S, 5 * self._beat_s):
            claim = self._key(f"claim/{word['leader']}/{word['beat']}")
            self._leads = self._store.add(claim, 1) == 1
            self._word_heard = now
            if self._leads:
                self._look(now)
                self._views[word["leader"]].heard = now - silent_s
        return True

    def _look(self, now: float) -> None:
        """Read the states of all ranks."""
        for rank in range(len(self._around.names)):
            key = self._key(f"state/{rank}")
            view = self._views.get(rank)
            if (view is None or view.state.beat == 0) and not self._store.check([key]):
                self._views.setdefault(rank, _View(RankState(rank, self._around.names[rank]), now))
                continue
            state = RankState.from_dict(json.loads(self._store.get(key)))
            if view is None or state.beat != view.state.beat:
                self._views[rank] = _View(state, now)

    def _lead(self, now: float) -> None:
        """Look for a hang, and where there is one report it and end the run."""
        self._say()
        self._look(now)
        if self._find_hang(now) is None:
            return
        self._collect()
        # Those who were asked may have gone on meanwhile.
        now = time.monotonic()
        self._look(now)
        diagnosis = self._find_hang(now)
        if diagnosis is not None and not self._closing.is_set():
            self._report(diagnosis, now)

    def _idle(self, now: float) -> dict[int, float]:
        """Return for how long each rank has got nothing done: by its own word, and since that."""
        return {
            rank: view.state.idle_s + (now - view.heard if now - view.heard > 3 * self._beat_s else 0.0)
            for rank, view in self._views.items()
        }

    def _silent(self, now: float) -> set[int]:
        """Return the ranks that have said nothing for long and, as their machine knows, will say nothing more."""
        return {
            rank
            for rank, view in self._views.items()
            if now - view.heard > 3 * self._beat_s
            and not view.state.left
            and is_silent_for_good(state_of(view.state.process))
        }

    def _find_hang(self, now: float) -> Diagnosis | None:
        """Return who holds up the run, or None where nobody does."""
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
        """Ask every rank that can hear for what it knows."""
        number = f"{self._rank}.{self._word['beat']}"
        self._say(_COLLECT, number=number)
        deadline = time.monotonic() + max(_ANSWER_S, 3 * self._beat_s)
        missing = {
            rank
            for rank, view in self._views.items()
            if rank != self._rank and not view.state.left and not is_silent_for_good(state_of(view.state.process))
        }
        answers: dict[int, Mapping[str, Any]] = {self._rank: self._answer()}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                key = self._key(f"answer/{number}/{rank}")
                if self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
                    missing.discard(rank)
            time.sleep(0.1)
            self._round_begun = time.monotonic()
        for rank in sorted(missing):
            state = self._views[rank].state
            found = ask_for_stacks(state.process, state.stack_file)
            if found:
                answers[rank] = {"stacks": found, "is_locked": True}
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
        """Do alone what can be done where the store itself does not answer: its process is stopped."""
        self._around.attend()
        while not self._closing.wait(self._beat_s):
            silent_s = time.monotonic() - self._round_begun
            owner = self._around.names[0]
            if silent_s < self._patience.silence_s + _ANSWER_S + 2 * self._beat_s or self._rank == 0:
                continue
            state = state_of(owner)
            if not is_silent_for_good(state):
                continue
            speakers = [rank for rank, name in enumerate(self._around.names) if state_of(name) == "alive"]
            if self._rank == min(speakers, default=self._rank):
                self._speak_alone(owner, silent_s)
            kill(owner)
            self._around.leave(1)

    def _speak_alone(self, owner: ProcessName, silent_s: float) -> None:
        blocked = blocked_in(self._recorder)
        states = {
            0: RankState(0, owner, phase="unknown"),
            self._rank: RankState(
                self._rank,
                self._around.names[self._rank],
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
