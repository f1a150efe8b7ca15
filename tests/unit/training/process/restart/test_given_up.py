"""Numbers that an abort of communication has left decide nothing: not a step, not a restart, not an exit status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError, InputError, MegatronError, TrainingError
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.training import pretrain
from megatron.training.callbacks import layer_statistics
from megatron.training.callbacks.periodic_evals import SampleTexts, TaskScores
from megatron.training.fault_tolerance import rendezvous, watchdog
from megatron.training.fault_tolerance.inprocess_restart import RendezvousMember
from megatron.training.fault_tolerance.rendezvous import GroupLinks, is_broken_communication
from megatron.training.initialize import LaunchEnvironment, initialize_runtime
from megatron.training.training_step import agree_to_exit
from tests.unit.training.config.command_lines import MINIMAL


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

    monkeypatch.setattr(pretrain, "check_packages", fail)
    flight, links = FlightRecorder(), GroupLinks()
    links.are_made(flight)
    member = RendezvousMember(None, None, links, None)  # type: ignore[arg-type]

    def attempt() -> int:
        program = pretrain.Program(LaunchEnvironment(), None, None, None, None, (), 0.0)  # type: ignore[arg-type]
        return pretrain._pretrain_once(None, program, member)  # type: ignore[arg-type]

    assert attempt() == (2 if isinstance(error, ConfigurationError) else 1)
    flight.give_up()
    with pytest.raises(type(error)):
        attempt()
