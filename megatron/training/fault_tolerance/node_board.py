"""Node board: the ranks of a node exchange their states in files, and one rank, the speaker, writes them to the store.

With one connection per rank, the store would have as many clients as the world has ranks, and the watchdog's leader
would read one key per rank. So the ranks of a node write their states into one folder per node, and the speaker writes
all of them into the store under one key. The speaker is the first rank of the node. If it falls silent, the first rank
that notices opens a connection and becomes the speaker.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.training.fault_tolerance.processes import ProcessName
from megatron.training.fault_tolerance.rank_state import RankState

_SPOKEN, _STATE, _ANSWER = "spoken", "state", "answer"


class Store(Protocol):
    """Key-value store that all nodes can reach."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that exist, in one request."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""


def node_folder(prefix: str, machine: str) -> Path:
    """Return the folder of a node's ranks, the same on all of them; ``prefix`` is unique to a run."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{prefix}-{machine}")
    return Path(tempfile.gettempdir()) / f"megatron-hang-{name}"


def enter(folder: Path, state: RankState) -> None:
    """Write a rank's first state into the folder of its node.

    Raises:
        OSError: the state file cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    _write(folder, f"{_STATE}-{state.rank}", state.to_dict(), state.rank)


def processes_in(folder: Path) -> dict[int, ProcessName]:
    """Return the processes that have written a state, by rank."""
    states = [RankState.from_dict(values) for values in _states_in(folder)]
    return {state.rank: state.process for state in sorted(states, key=lambda state: state.rank)}


class NodeBoard:
    """Exchange of states, orders and answers with other ranks; ``node_of`` maps ranks to their node's first rank.

    ``connect`` opens the store, only on the speaker.
    """

    def __init__(
        self, rank: int, folder: Path, node_of: Sequence[int], prefix: str, connect: Callable[[], Store]
    ) -> None:
        self._rank = rank
        self._folder = folder
        self.node_of = tuple(node_of)
        self.nodes = tuple(sorted(set(node_of)))
        self._node = node_of[rank]
        self._prefix = prefix
        self._connect = connect
        self._store: Store | None = None
        self._known: set[int] = set()
        self._word: dict[str, Any] | None = None
        self._num_spoken = 0
        self._heard = ""
        self._heard_at: float | None = None

    @property
    def speaks(self) -> bool:
        return self._store is not None

    def open(self) -> None:
        """Become the speaker of the node.

        Raises:
            ConfigurationError: the store cannot be reached.
        """
        self._store = self._connect()

    def start_again(self, now: float) -> None:
        """Reset the time of the speaker's silence, because this process was suspended."""
        self._heard_at = now

    def post_state(self, state: Mapping[str, Any]) -> None:
        """Write this rank's state."""
        self._write(f"{_STATE}-{self._rank}", state)

    def forward(self) -> None:
        """Write the states of this node's ranks into the store; only the speaker calls this."""
        self._reached.set(self._key(f"node/{self._node}"), json.dumps(_states_in(self._folder)))

    def states(self) -> Iterable[dict[str, Any]]:
        """Yield the states of all ranks whose nodes have written to the store, with one request for all known nodes."""
        store = self._reached
        new = [node for node in self.nodes if node not in self._known]
        self._known.update(node for node in new if store.check([self._key(f"node/{node}")]))
        keys = [self._key(f"node/{node}") for node in sorted(self._known)]
        for text in store.multi_get(keys) if keys else []:
            yield from json.loads(text)

    def say(self, word: Mapping[str, Any]) -> None:
        """Send an order to all nodes; only a speaker that leads may call this."""
        self._reached.set(self._key("word"), json.dumps(word))
        self._speak(dict(word))

    def hear(self, now: float, silence_s: float) -> dict[str, Any] | None:
        """Return the leader's last order, or None before the first one.

        The speaker reads it from the store and repeats it on the node. If the speaker has been silent for
        ``silence_s``, this rank becomes the speaker, unless another rank was faster.
        """
        if self._store is None:
            self._listen(now, silence_s)
        if self._store is not None:
            key = self._key("word")
            if self._store.check([key]):
                self._word = json.loads(self._store.get(key))
            self._speak(self._word)
        return self._word

    def leave_word(self, word: Mapping[str, Any]) -> None:
        """Send an order to this node's ranks without the store."""
        self._speak(dict(word))

    def claim(self, name: str) -> bool:
        return self._reached.add(self._key(f"claim/{name}"), 1) == 1

    def post_answer(self, number: str, answer: Mapping[str, Any]) -> None:
        """Write this rank's answer to the request with this number."""
        self._write(f"{_ANSWER}-{number}-{self._rank}", {"rank": self._rank, "answer": dict(answer)})

    def forward_answers(self, number: str) -> None:
        """Write the answers of this node's ranks into the store; only the speaker calls this."""
        found = [values for path in sorted(self._folder.glob(f"{_ANSWER}-{number}-*.json")) if (values := _read(path))]
        if found:
            self._reached.set(self._key(f"answer/{number}/{self._node}"), json.dumps(found))

    def answers(self, number: str, nodes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the answers of some nodes' ranks, by rank."""
        keys = [self._key(f"answer/{number}/{node}") for node in nodes]
        keys = [key for key in keys if self._reached.check([key])]
        texts = self._reached.multi_get(keys) if keys else []
        return {each["rank"]: each["answer"] for text in texts for each in json.loads(text)}

    def close(self) -> None:
        """Remove the folder if all ranks of the node have left, which only the last rank finds."""
        if all(state["left"] for state in _states_in(self._folder)):
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _reached(self) -> Store:
        assert self._store is not None, "only the speaker of a node reaches the store"
        return self._store

    def _key(self, name: str) -> str:
        return f"megatron/hang/{self._prefix}/{name}"

    def _listen(self, now: float, silence_s: float) -> None:
        spoken = _read(self._folder / f"{_SPOKEN}.json")
        heard = "0" if spoken is None else f"{spoken['speaker']}-{spoken['number']}"
        if spoken is not None:
            self._word = spoken["word"]
        if heard != self._heard or self._heard_at is None:
            self._heard, self._heard_at = heard, now
        elif now - self._heard_at > silence_s:
            self._heard_at = now
            try:
                (self._folder / f"after-{heard}").open("x").close()
            except FileExistsError:
                return
            self.open()

    def _speak(self, word: dict[str, Any] | None) -> None:
        self._word = word
        self._num_spoken += 1
        self._write(_SPOKEN, {"speaker": self._rank, "number": self._num_spoken, "word": word})

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        _write(self._folder, name, values, self._rank)


def _write(folder: Path, name: str, values: Mapping[str, Any], rank: int) -> None:
    """Write a file atomically."""
    unfinished = folder / f"{name}.{rank}.tmp"
    unfinished.write_text(json.dumps(values))
    os.replace(unfinished, folder / f"{name}.json")


def _states_in(folder: Path) -> list[dict[str, Any]]:
    """Return the states of a node's ranks."""
    return [values for path in sorted(folder.glob(f"{_STATE}-*.json")) if (values := _read(path))]


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return values
