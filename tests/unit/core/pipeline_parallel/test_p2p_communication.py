"""Links: both ends agree on the communicator, and no rank has two links on one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import Link, LocalQueue, PipelineLinks, create_pipeline_links
from megatron.core.process_group import Group, single_rank_group
from megatron.verification.communication_replay import Call, Operation, communication_problems


def record_use(kind: str, uses: list[Operation]) -> Callable[..., object]:
    """Note a send or a receive and complete it at once."""

    def use(tensor: torch.Tensor, *, group: int, tag: int, **peer: int) -> object:
        (other,) = peer.values()
        uses.append((Call(kind, f"link {group}", (), tensor.nbytes, peer=other),))
        return SimpleNamespace(wait=lambda: None)

    return use


def links_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, wraps_around: bool, logs: dict[int, list[Operation]] | None = None
) -> list[PipelineLinks]:
    """Make every rank's links with communicators that are numbered in the order in which the rank makes them.

    ``logs`` is given what each rank sends and receives meanwhile.
    """
    links = []
    for rank in range(size):
        made: list[int] = []
        uses: list[Operation] = []
        if logs is not None:
            logs[10 * rank] = uses

        def new_group(ranks: list[int], made: list[int] = made, **options: object) -> int:
            assert ranks == [10 * r for r in range(size)]
            assert options["use_local_synchronization"]
            made.append(len(made))
            return made[-1]

        monkeypatch.setattr(p2p_communication.dist, "new_group", new_group)
        monkeypatch.setattr(p2p_communication.dist, "isend", record_use("send", uses))
        monkeypatch.setattr(p2p_communication.dist, "irecv", record_use("receive", uses))
        pp = Group(axes=("pp",), ranks=tuple(10 * r for r in range(size)), rank=rank, handle="the pipeline")
        links.append(create_pipeline_links(pp, wraps_around=wraps_around))
        # Ranks that made different numbers of groups could never make another one together.
        assert len(made) == {(2, False): 2}.get((size, wraps_around), 6 if size % 2 and wraps_around else 4)
    return links


@pytest.mark.parametrize("wraps_around", [False, True])
@pytest.mark.parametrize("size", range(2, 8))
def test_every_link_has_two_ends_and_a_communicator_to_itself(
    monkeypatch: pytest.MonkeyPatch, size: int, wraps_around: bool
) -> None:
    ranks = links_of_all_ranks(monkeypatch, size, wraps_around)
    for rank, mine in enumerate(ranks):
        following = ranks[(rank + 1) % size]
        if rank == size - 1 and not wraps_around:
            assert mine.activations_out is mine.gradients_in is None
            assert following.activations_in is following.gradients_out is None
            continue
        here, there = 10 * rank, 10 * ((rank + 1) % size)
        out, back = mine.activations_out, mine.gradients_in
        assert (out.sender, out.receiver, back.sender, back.receiver) == (here, there, there, here)
        for end, other in ((out, following.activations_in), (back, following.gradients_out)):
            assert (end.sender, end.receiver, end.handle) == (other.sender, other.receiver, other.handle)
    for mine in ranks:
        links = (mine.activations_in, mine.activations_out, mine.gradients_in, mine.gradients_out)
        handles = [link.handle for link in links if link is not None]
        assert len(handles) == len(set(handles))


@pytest.mark.parametrize("wraps_around", [False, True])
@pytest.mark.parametrize("size", range(2, 8))
def test_every_link_is_used_once_in_one_order_before_it_is_returned(
    monkeypatch: pytest.MonkeyPatch, size: int, wraps_around: bool
) -> None:
    logs: dict[int, list[Operation]] = {}
    ranks = links_of_all_ranks(monkeypatch, size, wraps_around, logs)
    for rank, mine in enumerate(ranks):
        outgoing = [("send", link) for link in (mine.activations_out, mine.gradients_out) if link is not None]
        incoming = [("receive", link) for link in (mine.activations_in, mine.gradients_in) if link is not None]
        expected = {
            (kind, f"link {link.handle}", link.receiver if kind == "send" else link.sender)
            for kind, link in (*outgoing, *incoming)
        }
        used = [(call.kind, call.communicator, call.peer) for (call,) in logs[10 * rank]]
        assert len(used) == len(expected)
        assert set(used) == expected
    # Ranks 10, 20, … of a world in which the others do nothing.
    assert communication_problems([logs.get(rank, []) for rank in range(10 * size)]) == []


def test_a_described_world_has_described_links() -> None:
    state = describe_parallel_state(5000, 16384, ParallelSizes(tp=8, pp=16))
    links = create_pipeline_links(state.pp)
    assert links.activations_in is not None
    assert links.activations_in.handle is None
    assert (links.activations_in.sender, links.activations_in.receiver) == (5000 - 1024, 5000)


def test_one_rank_has_no_links_and_hands_over_to_itself() -> None:
    links = create_pipeline_links(describe_parallel_state(3, 8, ParallelSizes(tp=4)).pp)
    assert set(vars(links).values()) == {None}
    queue = LocalQueue()
    queue.send("first")
    queue.send("second")
    assert [queue.take(), queue.take()] == ["first", "second"]


@pytest.mark.parametrize(
    ("backends", "expected"),
    [((), True), ((None, None), True), (("gloo", "gloo"), True), (("gloo", "nccl"), False), ((None, "nccl"), False)],
)
def test_receives_are_posted_ahead_where_every_link_progresses_by_itself(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str | None, ...], expected: bool
) -> None:
    monkeypatch.setattr(p2p_communication.dist, "get_backend", lambda handle: handle)
    links = [Link(0, 1, backend, single_rank_group(("pp",))) for backend in backends]  # type: ignore[arg-type]
    assert PipelineLinks(*links).post_receives_ahead is expected
