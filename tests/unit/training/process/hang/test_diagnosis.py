"""Who holds up whom, from where the ranks stand."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.flight.communication import Communication
from megatron.training.process.hang.diagnosis import diagnose
from megatron.training.process.hang.processes import ProcessName
from megatron.training.process.hang.rank_state import DeviceState, RankState

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
    states = [state(0, ("world[0-3]", 2), world=2, tp=4), state(1, ("tp[0,1]", 5), world=1, tp=5)]
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
    rank: int, blocked: tuple[str, int] | None = None, ahead: tuple[str, int] | None = None, **entered: int
) -> RankState:
    """Return a rank whose host has begun ten communications of each group, and how far its device has come."""
    said = (
        None if each is None else Communication(*each, "op", 8, (2,), "f.py:1", 9.0, None) for each in (blocked, ahead)
    )
    counts = {name: entered.get(name.split("[")[0].split(" ")[0], 0) for name in CHANNELS}
    device = DeviceState(*said, counts)
    return RankState(rank, NOWHERE, entered=dict.fromkeys(CHANNELS, 10), on_device=device)


def test_a_device_that_computes_while_others_communicate_is_blamed_though_all_hosts_have_begun() -> None:
    states = [on_device(0, ("tp[0,1]", 5), tp=5), on_device(1, ahead=("tp[0,1]", 5), tp=4)]
    found = diagnose({item.rank: item for item in states})
    assert [(c.rank, c.waiting, c.has_entered) for c in found.culprits] == [(1, (0,), False)]
    assert found.culprits[0].waits_in == states[0].waits_in


def test_a_host_that_has_not_given_its_device_the_communication_is_blamed() -> None:
    late = state(1, tp=4)
    assert culprits([on_device(0, ("tp[0,1]", 5), tp=5), late]) == [(1, (0,))]


def test_devices_that_communicate_in_different_orders_are_both_named() -> None:
    states = [on_device(0, ("world[0-3]", 2), world=2, tp=4), on_device(1, ("tp[0,1]", 5), world=1, tp=5)]
    found = diagnose({item.rank: item for item in states})
    assert found.is_circle
    assert [culprit.rank for culprit in found.culprits] == [0, 1]


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
