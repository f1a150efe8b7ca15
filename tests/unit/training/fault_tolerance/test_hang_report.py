"""Who holds up whom, from where the ranks stand, and the stacks of a process that holds Python's lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.cli.hang_report import newest_report
from megatron.core.errors import InputError
from megatron.core.flight_recorder import Communication
from megatron.training.fault_tolerance.hang_report import diagnose
from megatron.training.fault_tolerance.processes import ProcessName, this_process
from megatron.training.fault_tolerance.rank_state import DeviceState, RankState, StackFile, ask_for_stacks, parse_stacks
from tests.harness.training_run import REPOSITORY

NOWHERE = ProcessName("host", "another machine", 1, 1)
CHANNELS = ("tp[0,1]", "tp[2,3]", "activations 0->2[0,2]", "world[0-3]")


def state(rank: int, blocked: tuple[str, int] | None = None, left: bool = False, **entered: int) -> RankState:
    """Return a rank's state; ``entered`` has the channels by their axes."""
    waits_in = None if blocked is None else Communication(blocked[0], blocked[1], "op", 8, (2,), "f.py:1", 9.0, None)
    counts = {name: entered.get(name.split("[")[0].split(" ")[0], 0) for name in CHANNELS}
    return RankState(rank, NOWHERE, entered=counts, blocked=waits_in, left=left)


def culprits(states: list[RankState], silent: tuple[int, ...] = ()) -> list[tuple[int, tuple[int, ...]]]:
    found = diagnose({item.rank: item for item in states}, silent)
    return [(culprit.rank, culprit.waiting) for culprit in found.culprits]


def test_who_has_not_entered_is_blamed() -> None:
    assert culprits([state(0, ("tp[0,1]", 5), tp=5), state(1, tp=4)]) == [(1, (0,))]


def test_the_end_of_a_chain_is_blamed() -> None:
    states = [
        state(0, tp=4),
        state(1, ("tp[0,1]", 5), tp=5),
        state(2, ("activations 0->2[0,2]", 3), activations=3),
        state(3, ("tp[2,3]", 9), tp=9),
    ]
    assert culprits(states) == [(0, (1, 2))]


def test_who_is_silent_is_blamed_before_who_computes() -> None:
    states = [state(0, ("world[0-3]", 2), world=2), state(1), state(2, world=1), state(3, world=1)]
    assert culprits(states, silent=(3,)) == [(3, (0,))]


def test_a_silent_rank_within_a_communication_is_blamed_for_it() -> None:
    states = [state(0, ("tp[0,1]", 5), tp=5), state(1, ("tp[0,1]", 5), tp=5)]
    found = diagnose({item.rank: item for item in states}, (1,))
    assert [(c.rank, c.has_entered) for c in found.culprits] == [(1, True)]


def test_two_who_wait_for_each_other_are_both_named() -> None:
    assert_both_are_named(state(0, ("world[0-3]", 2), world=2, tp=4), state(1, ("tp[0,1]", 5), world=1, tp=5))


def test_devices_that_communicate_in_different_orders_are_both_named() -> None:
    assert_both_are_named(on_device(0, ("world[0-3]", 2), world=2, tp=4), on_device(1, ("tp[0,1]", 5), world=1, tp=5))


def assert_both_are_named(*states: RankState) -> None:
    found = diagnose({item.rank: item for item in states})
    assert found.is_circle
    assert [culprit.rank for culprit in found.culprits] == [0, 1]


def test_a_rank_alone_is_blamed_for_itself() -> None:
    assert culprits([state(0)]) == [(0, ())]


def test_where_all_have_entered_the_transport_is_to_blame_and_all_are_named() -> None:
    assert culprits([state(0, ("tp[0,1]", 5), tp=5), state(1, ("tp[0,1]", 5), tp=5)]) == [(0, ()), (1, ())]


def test_one_who_has_left_is_blamed_where_somebody_waits_for_it() -> None:
    assert culprits([state(0, ("tp[0,1]", 5), tp=5), state(1, left=True, tp=4)]) == [(1, (0,))]


def on_device(
    rank: int,
    inside: tuple[str, int] | None = None,
    ahead: tuple[str, int] | None = None,
    beside: tuple[str, int] | None = None,
    **entered: int,
) -> RankState:
    """Return a rank whose host has begun ten communications of each group, and how far its device has come."""
    said = [
        () if each is None else (Communication(*each, "op", 8, (2,), "f.py:1", 9.0, None),)
        for each in (inside, beside, ahead)
    ]
    counts = {name: entered.get(name.split("[")[0].split(" ")[0], 0) for name in CHANNELS}
    device = DeviceState(said[0], said[1], said[2][0] if said[2] else None, counts)
    return RankState(rank, NOWHERE, entered=dict.fromkeys(CHANNELS, 10), on_device=device)


def test_a_device_that_computes_while_others_communicate_is_blamed_though_all_hosts_have_begun() -> None:
    states = [on_device(0, ("tp[0,1]", 5), tp=5), on_device(1, ahead=("tp[0,1]", 5), tp=4)]
    found = diagnose({item.rank: item for item in states})
    assert [(c.rank, c.waiting, c.has_entered) for c in found.culprits] == [(1, (0,), False)]
    assert found.culprits[0].waits_in == found.waits_in[0] == states[0].may_wait_in[0]


def test_a_host_that_has_not_given_its_device_the_communication_is_blamed() -> None:
    late = state(1, tp=4)
    assert culprits([on_device(0, ("tp[0,1]", 5), tp=5), late]) == [(1, (0,))]


def test_where_all_devices_are_in_a_communication_the_transport_is_to_blame() -> None:
    states = [on_device(rank, ("tp[0,1]", 5), tp=5) for rank in range(2)]
    found = diagnose({item.rank: item for item in states})
    assert [(c.rank, c.has_entered) for c in found.culprits] == [(0, True), (1, True)]


def test_a_host_that_is_blocked_waits_for_hosts() -> None:
    """Making a connection holds the host: it waits for those who have not begun to, whatever their devices do."""
    blocked = Communication("tp[0,1]", 10, "op", 8, (2,), "f.py:1", 9.0, None)
    waiting = replace(on_device(0, tp=3), blocked=blocked)
    late = replace(on_device(1, ahead=("tp[0,1]", 8), tp=7), entered={"tp[0,1]": 9})
    assert culprits([waiting, late]) == [(1, (0,))]
    assert culprits([waiting, replace(late, entered={"tp[0,1]": 10})]) == [(1, ())]


def held(state: RankState, channel: str, sequence: int) -> RankState:
    """Return the rank with its host between the begin and the end of a communication."""
    return replace(state, blocked=Communication(channel, sequence, "op", 8, (2,), "f.py:1", 1.0, None))


def test_hosts_that_a_full_queue_holds_are_compared_by_their_devices() -> None:
    states = [
        held(on_device(0, ("tp[0,1]", 5), tp=5), "tp[0,1]", 10),
        held(on_device(1, ahead=("tp[0,1]", 5), tp=4), "tp[0,1]", 10),
    ]
    found = diagnose({item.rank: item for item in states})
    assert [(c.rank, c.waiting, c.has_entered) for c in found.culprits] == [(1, (0,), False)]
    assert found.waits_in[0] is not None
    assert found.waits_in[0].sequence == 5
    assert found.waits_in[1] is None
    # One of the hosts alone, in a communication of others, is no other order.
    states[1] = on_device(1, ahead=("tp[0,1]", 5), tp=4)
    assert culprits([held(states[0], "world[0-3]", 9), states[1]]) == [(1, (0,))]


def test_a_host_waits_for_hosts_where_its_device_has_nothing_else_to_communicate() -> None:
    """What it is in was marked as reached, and nothing behind it: that is no work of the device."""
    waiting = held(on_device(0, ("tp[0,1]", 10), tp=10), "tp[0,1]", 10)
    assert not waiting.is_held_by_device
    assert held(on_device(0, ("tp[0,1]", 9), tp=10), "tp[0,1]", 10).is_held_by_device
    assert not held(on_device(0, ahead=("tp[0,1]", 10), tp=9), "tp[0,1]", 10).is_held_by_device


def test_the_first_use_of_a_communicator_waits_for_hosts() -> None:
    states = [held(on_device(0, ahead=("tp[0,1]", 5), tp=4), "world[0-3]", 1), state(1)]
    assert culprits(states) == [(1, (0,))]


def test_what_is_over_beside_hides_no_missing_rank() -> None:
    """Rank 0's device hangs in a kernel; both have a bucket reduced, and the wait for it is behind that kernel."""
    bucket, sum_of_tp = ("world[0-3]", 1), ("tp[0,1]", 7)
    states = [
        on_device(0, ahead=sum_of_tp, beside=bucket, tp=6, world=1),
        on_device(1, sum_of_tp, beside=bucket, tp=7, world=1),
        # Others are in a sum of their own that all have reached: they wait for nobody.
        on_device(2, beside=bucket, world=1),
    ]
    found = diagnose({item.rank: item for item in states})
    assert [(c.rank, c.waiting, c.has_entered) for c in found.culprits] == [(0, (1,), False)]
    assert found.waits_in[0] is None
    assert found.waits_in[1] is not None
    assert found.waits_in[1].channel == "tp[0,1]"


def test_where_nobody_is_missing_what_goes_on_beside_is_named() -> None:
    states = [on_device(rank, beside=("tp[0,1]", 5), tp=5) for rank in range(2)]
    assert culprits(states) == [(0, ()), (1, ())]
    found = diagnose({item.rank: item for item in states})
    assert [each.sequence for each in found.waits_in.values() if each is not None] == [5, 5]


WRITTEN = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap

Current thread 0x00008a (most recent call first):
  File "/home/me/megatron/core/collectives.py", line 56 in all_reduce
  File "/home/me/train.py", line 9 in <module>
"""
LOCKED = """
import ctypes, sys
from megatron.training.fault_tolerance.rank_state import StackFile
file = StackFile()
print(file.path, flush=True)
def hold_the_lock():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
hold_the_lock()
"""

LATE = """
import faulthandler, os
from megatron.training.fault_tolerance import rank_state
real = faulthandler.unregister
def unregister(number):
    real(number)
    os.kill(os.getpid(), number)
faulthandler.unregister = unregister
rank_state.StackFile().close()
"""


def test_what_is_written_is_read_with_the_innermost_last_and_the_main_thread_first() -> None:
    main, other = parse_stacks(WRITTEN)
    assert main["thread"] == "MainThread"
    assert main["frames"] == ["home/me/train.py:9 in <module>", "megatron/core/collectives.py:56 in all_reduce"]
    assert other["frames"][-1] == "lib/python3.11/threading.py:331 in wait"
    assert parse_stacks("") == []


def test_a_process_that_holds_the_lock_shows_where() -> None:
    child = subprocess.Popen([sys.executable, "-c", LOCKED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        path = child.stdout.readline().strip()
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        name = ProcessName("host", this_process().machine, child.pid, started)
        threading.Event().wait(0.3)
        (stack,) = ask_for_stacks(name, path)
        assert stack["frames"][-1] == "<string>:9 in hold_the_lock"
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_the_file_is_gone_when_it_is_closed_and_another_may_follow() -> None:
    for _ in range(2):
        file = StackFile()
        assert Path(file.path).is_file()
        assert ask_for_stacks(this_process(), file.path)[0]["frames"][-1].endswith(" in ask_for_stacks")
        file.close()
        assert not Path(file.path).exists()


def test_a_signal_that_comes_while_the_file_is_closed_ends_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], cwd=REPOSITORY, timeout=60.0).returncode == 0


def test_a_folder_stands_for_its_newest_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no hang-\*\.json"):
        newest_report(tmp_path)
    for name in ("hang-20261128-011100.json", "hang-20261127-235959.json"):
        (tmp_path / name).write_text("{}")
    assert newest_report(tmp_path) == tmp_path / "hang-20261128-011100.json"
    assert newest_report(tmp_path / "hang.json") == tmp_path / "hang.json"
