"""Replay the torch.distributed operations of all ranks of a layout together, under the rules of NCCL.

A log has one rank's operations in the order of the host's calls; `collective_recorder` records it. The rules:

- **Match.** The members of a communicator call the same collectives in the same order, with equal bytes, dtype, root
  and reduction; the n-th send of a rank to a peer has the bytes and dtype of that peer's n-th receive. NCCL checks none
  of this: it hangs, or returns wrong results (NCCL user guide, "Collective Operations", "Point-to-point
  communication"). For an all-to-all with variable numbers of rows, only the bytes of a row are compared, because the
  numbers depend on values, which a recording does not have.
- **Groups.** A process group bound to a device is split off the communicator of all ranks. All of them must call
  ``ncclCommSplit`` together, each with its own new members. Torch names a group created with
  ``use_local_synchronization`` by its members and the number of groups that the rank has created.
- **Dtypes.** NCCL has no 16-bit integers and no complex numbers.
- **Threads.** Only one thread may use communicators, because the calls of two threads have no defined order.
- **First use.** The first collective of a communicator and the first message of each direction of a pair connect the
  ranks, and block the host until all of them have called (NVIDIA/nccl #783 and #1691, PaddlePaddle/Paddle #54431).
- **One order.** A message is not buffered: a send may last until its receive has been called. The kernels of two
  communicators on one GPU need not run concurrently. Then the first call blocks all later ones, on the device and, if
  the host waits for the device, on the host (NCCL user guide, "Using multiple NCCL communicators concurrently";
  meta-pytorch/torchrec #4472). So a layout is safe on any device if it also runs when every operation blocks its rank
  until all participants have called it. The rule is sufficient: such a run gives the operations of all ranks one common
  order, and the first unfinished operation in it is not blocked by any other. The rule is not necessary: a layout that
  needs independent progress fails here, but may run on a device that provides it.

Sends and receives that are called together (``batch_isend_irecv``) are one operation whose parts progress together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NCCL_DTYPES = frozenset(
    (
        *("uint8", "int8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    ``ranks`` are the communicator's. ``signature`` has the properties that its members must agree on: dtype, bytes,
    root, reduction. ``peer`` is the other rank of a send or a receive, and ``new_ranks`` are the members of a new
    group.
    """

    kind: str
    communicator: str
    ranks: tuple[int, ...]
    num_bytes: int = 0
    dtype: str = ""
    detail: str = ""
    peer: int | None = None
    new_ranks: tuple[int, ...] = ()
    in_other_thread: bool = False

    @property
    def signature(self) -> tuple[str, int, str, str]:
        """Return the properties that all participants must agree on; a send and its receive have the same kind."""
        return "message" if self.peer is not None else self.kind, self.num_bytes, self.dtype, self.detail

    def describe(self) -> str:
        """Describe the call in words."""
        where = f"of ranks {list(self.ranks)}" if self.peer is None else f"with rank {self.peer}"
        made = f" of {list(self.new_ranks)}" if self.new_ranks else ""
        size = f" ({self.num_bytes} bytes of {self.dtype}{', ' + self.detail if self.detail else ''})"
        return f"{self.kind}{made} {where}{size if self.dtype else ''}"


Operation = tuple[Call, ...]
"""One call, or sends and receives that are called together."""

CallLog = Sequence[Operation]

INDEPENDENT_PROGRESS = "this runs only where communicators progress independently"
"""Prefix of problems that need not occur on every device."""

_Key = tuple[str | int, ...]


def communication_problems(logs: Sequence[CallLog]) -> list[str]:
    """Return the rule violations in the logs of ranks 0, 1, … of one world, one line each."""
    problems = [*_problems_of_calls(logs)]
    connected = _Replay(logs, holds_always=False)
    problems += connected.run()
    if not problems:
        problems = [f"{INDEPENDENT_PROGRESS}: {line}" for line in _Replay(logs, holds_always=True).run()]
    return problems


def _problems_of_calls(logs: Sequence[CallLog]) -> Iterator[str]:
    for rank, log in enumerate(logs):
        for call in (call for operation in log for call in operation):
            if call.in_other_thread:
                yield f"rank {rank}: {call.describe()} comes from a different thread than the other calls"
            if call.dtype and call.dtype not in NCCL_DTYPES:
                yield f"rank {rank}: {call.describe()} has a dtype that NCCL does not support"


class _Replay:
    """Simulation in which every rank runs its log as far as the others allow."""

    def __init__(self, logs: Sequence[CallLog], holds_always: bool) -> None:
        self._logs = logs
        self._holds_always = holds_always
        self._position = [0] * len(logs)
        self._num_calls: Counter[_Key] = Counter()
        self._called: dict[_Key, dict[int, Call]] = defaultdict(dict)
        self._waiting: dict[int, list[_Key]] = {}
        self._waiters: dict[_Key, set[int]] = defaultdict(set)

    def run(self) -> list[str]:
        """Return the problems: ranks that deadlock, or calls that do not match."""
        runnable = list(range(len(self._logs)))
        while runnable:
            runnable += self._advance(runnable.pop())
        problems = [*self._mismatches()]
        if self._waiting:
            waits = "; ".join(self._describe_wait(rank) for rank in sorted(self._waiting))
            problems.append(f"{len(self._waiting)} of {len(self._logs)} ranks wait forever: {waits}")
        return problems

    def _advance(self, rank: int) -> set[int]:
        """Run a rank until it blocks, and return the ranks that its calls unblock."""
        released: set[int] = set()
        while self._position[rank] < len(self._logs[rank]):
            operation = self._logs[rank][self._position[rank]]
            if rank in self._waiting:
                keys = self._waiting[rank]
            else:
                keys = [self._call(rank, call) for call in operation]
                for key in keys:
                    released |= self._waiters.pop(key, set())
            if any(self._is_held(key, call) for key, call in zip(keys, operation)):
                self._waiting[rank] = keys
                for key in keys:
                    self._waiters[key].add(rank)
                return released - {rank}
            self._waiting.pop(rank, None)
            self._position[rank] += 1
        return released - {rank}

    def _call(self, rank: int, call: Call) -> _Key:
        """Record a call, and return the key that its participants share."""
        if call.peer is None:
            place: _Key = (call.communicator, rank)
            self._num_calls[place] += 1
            key: _Key = (call.communicator, self._num_calls[place])
        else:
            ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
            place = (call.communicator, *ends, call.kind)
            self._num_calls[place] += 1
            key = (call.communicator, *ends, self._num_calls[place])
        self._called[key][rank] = call
        return key

    def _takes_part(self, key: _Key, call: Call) -> tuple[int, ...]:
        return call.ranks if call.peer is None else tuple(int(end) for end in key[1:3])

    def _is_held(self, key: _Key, call: Call) -> bool:
        may_hold = self._holds_always or key[-1] == 1 or call.kind == "new_group"
        return may_hold and len(self._called[key]) < len(self._takes_part(key, call))

    def _mismatches(self) -> Iterator[str]:
        """Report the first difference on each communicator, because later ones are its consequences."""
        reported: set[str | int] = set()
        for key, calls in self._called.items():
            if key[0] in reported:
                continue
            problem = self._mismatch(key, calls)
            if problem is not None:
                reported.add(key[0])
                yield problem

    def _mismatch(self, key: _Key, calls: dict[int, Call]) -> str | None:
        said = "; ".join(f"rank {rank}: {call.describe()}" for rank, call in sorted(calls.items()))
        first = next(iter(calls.values()))
        if len({call.signature for call in calls.values()}) > 1:
            return f"matching calls differ: {said}"
        if any(calls[m].new_ranks != call.new_ranks for call in calls.values() for m in call.new_ranks if m in calls):
            return f"ranks create groups in different orders: {said}"
        if not self._waiting and len(calls) < len(self._takes_part(key, first)):
            missing = sorted(set(self._takes_part(key, first)) - set(calls))
            return f"ranks {missing} never make the call that matches: {said}"
        return None

    def _describe_wait(self, rank: int) -> str:
        position, operation = self._position[rank], self._logs[rank][self._position[rank]]
        held = [(key, call) for key, call in zip(self._waiting[rank], operation) if self._is_held(key, call)]
        awaited = sorted({m for key, call in held for m in self._takes_part(key, call)} - {rank})
        absent = [m for m in awaited if any(m not in self._called[key] for key, _ in held)]
        return f"rank {rank} in call {position + 1} of {len(self._logs[rank])}, {held[0][1].describe()}, for {absent}"
