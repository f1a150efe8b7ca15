"""Restarts without a new launch: processes meet, workers are replaced, and given-up numbers decide nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError, InputError, MegatronError, TrainingError
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.training import pretraining
from megatron.training.callbacks import layer_statistics
from megatron.training.callbacks.periodic_evals import SampleTexts, TaskScores
from megatron.training.fault_tolerance import rendezvous, watchdog
from megatron.training.fault_tolerance.inprocess_restart import RendezvousMember
from megatron.training.fault_tolerance.processes import KEEPER_NAME, identify, name_of
from megatron.training.fault_tolerance.rendezvous import (
    Generation,
    GroupLinks,
    Limits,
    Rendezvous,
    RestartError,
    is_broken_communication,
)
from megatron.training.initialize import LaunchEnvironment, initialize_runtime
from megatron.training.training_step import agree_to_exit
from tests.harness.training_run import REPOSITORY
from tests.unit.config.command_lines import MINIMAL

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
    with pytest.raises(RestartError, match=r"^ranks 1, 3 did not join within 2 s.*--inprocess-barrier-timeout$"):
        early.join()


def test_a_run_that_fails_too_often_is_given_up() -> None:
    store = dist.HashStore()
    member = Rendezvous(store, 0, 1, "a", Limits(patience_s=2.0, max_restarts=1))
    member.end(0)
    assert member.join() == Generation(1, ("a",))
    member.end(1)
    with pytest.raises(RestartError, match=r"has failed 2 times and ends, because --inprocess-max-iterations is 1$"):
        member.join()


# A rank whose workers do what the words of the command say, one word each.
RANK = """
import dataclasses, os, signal, sys, time
from types import SimpleNamespace
from megatron.training.initialize import LaunchEnvironment
from megatron.training.fault_tolerance.supervisor import keep_rank
config = SimpleNamespace(restart=SimpleNamespace(inprocess_restart=True, non_persistent_save_interval=None))
kept = keep_rank(config, LaunchEnvironment(rank=3, world_size=1))
assert 'torch' not in sys.modules
deed = sys.argv[1:][min(kept.num_predecessors, len(sys.argv) - 2)]
print(deed, os.getpid(), kept.counts.steps, kept.counts.saved, flush=True)
if deed == 'works':
    kept.counts.note_step()
    kept.counts.note_saved(40 + kept.num_predecessors)
    os.kill(os.getpid(), signal.SIGKILL)
if deed == 'dies':
    os.kill(os.getpid(), signal.SIGKILL)
if deed == 'fails':
    os._exit(75)
if deed == 'answers':
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while deed in ('waits', 'answers'):
    time.sleep(0.02)
sys.exit(int(deed))
"""


def start(*deeds: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *deeds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def read_worker(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline().split()[1])


def test_workers_are_replaced_until_one_ends_a_run_and_what_they_count_stays() -> None:
    process = start("works", "fails", "works", "0")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    said = [(words[0], *words[2:]) for words in map(str.split, out.splitlines())]
    assert said == [("works", "0", "None"), ("fails", "1", "40"), ("works", "1", "40"), ("0", "2", "42")]
    lines = errors.splitlines()
    assert [line.partition(": process ")[0] for line in lines] == 3 * ["WARNING: rank 3"]
    assert "was ended by SIGKILL" in lines[0]
    assert "has failed" in lines[1]


@pytest.mark.parametrize("status", [1, 2])
def test_the_end_of_a_run_is_the_keepers_too(status: int) -> None:
    process = start(str(status))
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == status


def test_a_rank_that_gets_nothing_done_is_given_up() -> None:
    process = start("dies")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(out.splitlines()) == 10
    assert errors.splitlines()[-1].startswith("error: rank 3: process ")


def test_a_worker_that_answers_sigterm_ends_the_rank_with_its_status() -> None:
    process = start("answers")
    worker = read_worker(process)
    assert (name_of(process.pid), name_of(worker) == KEEPER_NAME) == (KEEPER_NAME, False)
    time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 0


def test_a_worker_that_a_signal_ends_is_not_replaced_when_the_keeper_was_told_to_end() -> None:
    process = start("waits")
    read_worker(process)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM


def test_a_worker_ends_with_its_keeper() -> None:
    process = start("waits")
    worker = identify(read_worker(process))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while worker.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sums_that_were_given_up_while_they_were_read_are_no_agreement() -> None:
    runtime = initialize_runtime(resolve_arguments([*MINIMAL], 1).config, LaunchEnvironment())
    assert not agree_to_exit(None, runtime).signal_received
    runtime.flight.give_up()
    with pytest.raises(GivenUpError) as raised:
        agree_to_exit(None, runtime)
    assert is_broken_communication(raised.value)


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("look", [SampleTexts, TaskScores])
def test_nothing_is_written_of_a_look_that_was_given_up(
    capsys: pytest.CaptureFixture[str], look: type, is_finite: bool
) -> None:
    flight, written = FlightRecorder(), []

    def answer(*arguments: object, **more: object) -> object:
        if not is_finite:
            raise InputError("the logits are not finite")
        return [SimpleNamespace(tokens=(1,))] if look is SampleTexts else {"task": {"acc": 0.5}}

    each = look.__new__(look)
    each._runtime = SimpleNamespace(flight=flight, is_reporter=True)
    each._parts = SimpleNamespace(ddp_chunks=[])
    each._engine = SimpleNamespace(generate=answer)
    each._ranks = SimpleNamespace(lead=answer)
    each._tokenizer = SimpleNamespace(detokenize=lambda tokens: "text")
    each._prompts, each._request = ("prompt",), None
    metrics = SimpleNamespace(**dict.fromkeys(("write", "text", "scalars"), lambda *rest: written.append(rest)))
    each.write(3, metrics)
    assert bool(written) == is_finite
    assert "at iteration 3" in capsys.readouterr().out
    written.clear()
    flight.give_up()
    with pytest.raises(GivenUpError):
        each.write(3, metrics)
    assert not written
    assert not capsys.readouterr().out


def test_norms_that_were_given_up_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    flight, logged = FlightRecorder(), []
    config = resolve_arguments([*MINIMAL, "--log-layer-norms", "1"], 1).config
    run = SimpleNamespace(
        config=config,
        train_state=SimpleNamespace(iteration=0),
        parts=SimpleNamespace(ddp_chunks=[], optimizer=SimpleNamespace(loss_scale=1.0)),
        runtime=SimpleNamespace(state=None, flight=flight),
        log=logged.append,
        log_scalars=lambda figures, iteration: None,
    )
    monkeypatch.setattr(layer_statistics, "measure_layer_norms", lambda *arguments: None)
    monkeypatch.setattr(layer_statistics, "format_layer_norms", lambda iteration, norms: f"norms of {iteration}")
    monkeypatch.setattr(layer_statistics, "layer_norm_scalars", lambda norms: {})
    norms: Any = layer_statistics.LayerNorms()
    norms.on_gradients(run)
    flight.give_up()
    with pytest.raises(GivenUpError):
        norms.on_gradients(run)
    assert logged == ["norms of 1"]


@pytest.mark.parametrize("is_hang", [False, True])
def test_a_rank_knows_that_it_gives_up_before_communicators_are_aborted(
    monkeypatch: pytest.MonkeyPatch, is_hang: bool
) -> None:
    flight, known = FlightRecorder(), []
    monkeypatch.setattr(rendezvous, "abort_communicators", lambda: known.append(flight.is_given_up))
    monkeypatch.setattr(watchdog, "abort_communication", lambda: known.append(flight.is_given_up))
    links = GroupLinks()
    links.are_made(flight)
    assert not links.are_given_up
    if is_hang:
        watchdog._give_up(flight)
    else:
        links.shut_down()
    assert known == [True]
    assert links.are_given_up


@pytest.mark.parametrize("error", [TrainingError("not finite"), ConfigurationError("wrong")])
def test_an_error_that_was_read_from_what_was_given_up_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, error: MegatronError
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr(pretraining, "check_packages", fail)
    flight, links = FlightRecorder(), GroupLinks()
    links.are_made(flight)
    member = RendezvousMember(None, None, links, None)  # type: ignore[arg-type]

    def attempt() -> int:
        program = pretraining.Program(LaunchEnvironment(), None, None, None, None, (), 0.0)  # type: ignore[arg-type]
        return pretraining._pretrain_once(None, program, member)  # type: ignore[arg-type]

    assert attempt() == (2 if isinstance(error, ConfigurationError) else 1)
    flight.give_up()
    with pytest.raises(type(error)):
        attempt()
