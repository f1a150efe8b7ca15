"""Copies of ranks' state in memory: found when every rank has one of an iteration, sent to who has lost its machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.local_copies import CopyFile, LocalCopies
from megatron.core import collectives
from megatron.core.errors import CheckpointError
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from tests.harness.distributed import run_distributed

CPU = torch.device("cpu")
NUM_RANKS = 4


def tensors_of(rank: int, iteration: int) -> list[torch.Tensor]:
    """Return tensors of awkward sizes and types, whose values tell rank and iteration."""
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    return [
        torch.rand(3, 5, generator=generator),
        torch.rand(7 + rank, generator=generator).to(torch.bfloat16),
        torch.tensor(float(rank), dtype=torch.float64),
        torch.randint(0, 256, (13,), generator=generator, dtype=torch.uint8),
        torch.rand(2, generator=generator),
    ]


def make_state() -> ParallelState:
    return create_parallel_state(ParallelSizes().in_world(NUM_RANKS))


def copies_in(folder: Path, state: ParallelState, token: str, jump: int | None) -> LocalCopies:
    """Return the copies of a rank of two machines, with a folder each and two ranks."""
    machine = folder / f"machine{state.rank // 2}"
    machine.mkdir(exist_ok=True)
    return LocalCopies(machine, state, CPU, token, jump)


def save_iterations(copies: LocalCopies, rank: int, *iterations: int) -> None:
    for iteration in iterations:
        copies.save(tensors_of(rank, iteration), {"iteration": iteration, "note": f"of {iteration}"})


def load(copies: LocalCopies, rank: int) -> tuple[int, str, bool] | None:
    """Return what was found, and whether it has the values that were saved."""
    found = copies.find()
    if found is None:
        return None
    tensors = [torch.zeros_like(tensor) for tensor in tensors_of(rank, 0)]
    copies.load(found, tensors)
    expected = tensors_of(rank, found.iteration)
    return found.iteration, found.record["note"], all(map(torch.equal, tensors, expected))


def lose_a_machine(folder: Path, jump: int | None) -> tuple[object, object, object]:
    """Save, lose the second machine's memory, and go on; then a copy is torn, and both are lost."""
    state = make_state()
    save_iterations(copies_in(folder, state, "run", jump), state.rank, 3, 4, 5)
    dist.barrier()
    if state.rank == 0:
        shutil.rmtree(folder / "machine1")
    dist.barrier()
    again = copies_in(folder, state, "another", jump)
    after_loss = load(again, state.rank)
    save_iterations(again, state.rank, 6)
    dist.barrier()
    if state.rank == 1:
        for path in (folder / "machine0").glob("1.*"):
            if (CopyFile(path).record() or {}).get("iteration") == 6:
                CopyFile(path).allocate(16)
    dist.barrier()
    after_tear = load(copies_in(folder, state, "third", None), state.rank)
    dist.barrier()
    copies_in(folder, state, "third", jump).forget()
    return after_loss, after_tear, copies_in(folder, state, "fourth", jump).find()


def test_a_lost_machines_copies_come_from_the_ranks_that_keep_them_too(tmp_path: Path) -> None:
    found = run_distributed(NUM_RANKS, lose_a_machine, tmp_path, 2)
    # Rank 1's copy of iteration 6 is kept on the other machine, where only that machine's ranks look for it.
    assert found == NUM_RANKS * [((5, "of 5", True), (6, "of 6", True), None)]


def test_without_replication_a_lost_machine_leaves_no_copies(tmp_path: Path) -> None:
    found = run_distributed(NUM_RANKS, lose_a_machine, tmp_path, None)
    assert found == NUM_RANKS * [(None, None, None)]


def refuse_other_tensors(folder: Path) -> None:
    state = make_state()
    copies = copies_in(folder, state, "run", None)
    save_iterations(copies, state.rank, 1)
    found = copies.find()
    assert found is not None
    with pytest.raises(CheckpointError, match="is from a different model; remove the folder"):
        copies.load(found, [torch.zeros(1000)])


def test_copies_of_other_tensors_are_refused(tmp_path: Path) -> None:
    assert run_distributed(NUM_RANKS, refuse_other_tensors, tmp_path) == NUM_RANKS * [None]


def take_parity_apart(folder: Path) -> list[int | None]:
    """Tear the newest copy again and again; the one before it must always be there."""
    state = make_state()
    iterations: list[int | None] = []
    copies = copies_in(folder, state, "run", None)
    save_iterations(copies, state.rank, 1, 2)
    for _ in range(3):
        dist.barrier()
        if state.rank == 3:
            whole = {path: record for path in folder.glob("machine1/3.*") if (record := CopyFile(path).record())}
            newest = max(whole, key=lambda path: whole[path]["iteration"])
            CopyFile(newest).allocate(16)
        dist.barrier()
        copies = copies_in(folder, state, "later", None)
        found = copies.find()
        iterations.append(None if found is None else found.iteration)
        if found is not None:
            copies.load(found, tensors_of(state.rank, 0))
        save_iterations(copies, state.rank, (found.iteration if found else 0) + 1)
    return iterations


def abort_while_copies_are_sent(folder: Path) -> list[tuple[str, int | None]]:
    """Save twice; the second time communication is given up when the bytes have come."""
    flight = FlightRecorder()
    state = create_parallel_state(ParallelSizes().in_world(2), recorder=flight)
    copies = LocalCopies(folder, state, CPU, "run", 1)
    save_iterations(copies, state.rank, 3)
    send = collectives.dist.batch_isend_irecv

    def give_up(works: list[dist.P2POp]) -> list[dist.Work]:
        for work in send(works):
            work.wait()
        flight.give_up()
        return []

    collectives.dist.batch_isend_irecv = give_up
    with pytest.raises(GivenUpError):
        save_iterations(copies, state.rank, 4)
    flight.is_given_up = False
    dist.barrier()
    flight.give_up()
    with pytest.raises(GivenUpError):
        save_iterations(copies, state.rank, 5)
    flight.is_given_up = False
    dist.barrier()
    return sorted((path.name, (CopyFile(path).record() or {}).get("iteration")) for path in folder.iterdir())


def test_no_copy_is_whole_that_an_abort_left(tmp_path: Path) -> None:
    found = run_distributed(2, abort_while_copies_are_sent, tmp_path)[0]
    # The second slot was being filled: its own copy in the first attempt, which no other rank has.
    assert [item for item in found if item[0].startswith("0.") or item[0].endswith(".held")] == [
        ("0.0", 3),
        ("0.0.held", 3),
        ("0.1", None),
        ("0.1.held", None),
        ("1.0.held", 3),
        ("1.1.held", None),
    ]


def test_a_copy_that_was_being_written_costs_one_iteration(tmp_path: Path) -> None:
    assert run_distributed(NUM_RANKS, take_parity_apart, tmp_path) == NUM_RANKS * [[1, 1, 1]]
