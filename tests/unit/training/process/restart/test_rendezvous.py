"""Processes that meet: all come, one is replaced, some come too late, and what a store holds of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron.training.fault_tolerance.rendezvous import Generation, Limits, Rendezvous, RestartError

PATIENT = Limits(patience_s=20.0)


def join_all(*members: Rendezvous) -> list[Generation | None]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: member.join(), members))


def members_of(store: dist.HashStore, *tokens: str) -> list[Rendezvous]:
    return [Rendezvous(store, rank, len(tokens), token, PATIENT) for rank, token in enumerate(tokens)]


def test_all_ranks_meet_in_one_generation() -> None:
    assert join_all(*members_of(dist.HashStore(), "a", "b", "c")) == 3 * [Generation(0, ("a", "b", "c"))]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_replaced_process_makes_the_generation_over_and_is_in_the_next(dead: int) -> None:
    store = dist.HashStore()
    members = members_of(store, "a", "b")
    first, _ = join_all(*members)
    assert first is not None
    assert not members[1 - dead].is_over(first)
    replaced = Rendezvous(store, dead, 2, "new", PATIENT)
    members[dead] = replaced
    with ThreadPoolExecutor(2) as pool:
        coming = pool.submit(replaced.join)
        while not members[1 - dead].is_over(first):
            pass
        met = [pool.submit(members[1 - dead].join).result(), coming.result()]
    names = ("new", "b") if dead == 0 else ("a", "new")
    assert met == 2 * [Generation(1, names)]


def test_a_generation_is_ended_once_whoever_sees_it() -> None:
    members = members_of(dist.HashStore(), "a", "b")
    join_all(*members)
    for member in members:
        member.end(0)
    assert members[0].wanted == 1


def test_what_earlier_processes_left_in_the_store_joins_nobody() -> None:
    store = dist.HashStore()
    join_all(*members_of(store, "a", "b", "c"))
    met = join_all(*members_of(store, "d", "e"))
    assert met[0] is not None
    assert met[0].members == ("d", "e")
    assert met[0] == met[1]


def test_a_successor_after_the_end_of_the_work_has_nothing_to_do() -> None:
    store = dist.HashStore()
    members = members_of(store, "a", "b")
    generation = join_all(*members)[0]
    assert generation is not None
    members[0].note_done(generation)
    assert Rendezvous(store, 1, 2, "new", PATIENT).join() is None
    assert members[0].wanted == 0


def ticking() -> Callable[[], float]:
    times = iter(range(1000))
    return lambda: float(next(times))


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    early = Rendezvous(store, 0, 4, "a", Limits(patience_s=2.0), ticking())
    store.set("megatron/restart/rank/2", '[0, "c"]')
    with pytest.raises(RestartError, match=r"^ranks 1, 3 did not come within 2 s.*--inprocess-barrier-timeout$"):
        early.join()


def test_a_run_that_fails_too_often_is_given_up() -> None:
    store = dist.HashStore()
    member = Rendezvous(store, 0, 1, "a", Limits(patience_s=2.0, max_restarts=1))
    member.end(0)
    assert member.join() == Generation(1, ("a",))
    member.end(1)
    with pytest.raises(RestartError, match=r"has failed 2 times .*--inprocess-max-iterations 1"):
        member.join()
