"""What a terminal shows below the log while a run goes on, and what pipes do not get."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.printed_config import summarize
from megatron.core.console import CLEAR_LINE, format_bar, format_duration, print_line
from megatron.core.flight_recorder import FlightRecorder
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.loggers.log_lines import StepReport, format_first_step
from tests.unit.training.config.command_lines import MINIMAL

CONFIG = resolve_arguments([*MINIMAL, "--train-iters", "200", "--eval-interval", "50", "--save", "d"], 1).config
REPORT = StepReport(
    iteration=1,
    consumed_samples=4,
    global_batch_size=4,
    num_tokens=100.0,
    lm_loss=3.25,
    learning_rate=0.0,
    next_learning_rate=1e-3,
    loss_scale=1.0,
    next_loss_scale=1.0,
    grad_norm=2.0,
    num_zeros=None,
    params_norm=None,
    is_skipped=False,
    step_time_s=8.0,
    tokens_per_second=12345.6,
    tflops_per_device=0.00123,
    mfu=None,
    sample_ids_hash=None,
)


class Terminal:
    """Be standard output on a terminal, and keep what it is sent."""

    def __init__(self) -> None:
        self.leader, follower = pty.openpty()
        self.stream = os.fdopen(follower, "w")

    def read(self, text: str, timeout_s: float = 20.0) -> str:
        """Return what has come when ``text`` has."""
        found, deadline = "", time.monotonic() + timeout_s
        while text not in found:
            assert time.monotonic() < deadline, repr(found)
            if select.select([self.leader], [], [], 0.1)[0]:
                found += os.read(self.leader, 65536).decode()
        return found


@pytest.fixture
def terminal():
    """Return a terminal that becomes standard output in the test."""
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.leader)


def test_a_terminal_shows_where_the_run_is_below_what_it_prints(terminal: Terminal) -> None:
    flight = FlightRecorder()
    with contextlib.redirect_stdout(terminal.stream), LiveLine(CONFIG, flight, is_reporter=True) as line:
        assert terminal.read("s\r").startswith(f"{CLEAR_LINE}setting up ")
        flight.enter("forward")
        terminal.read(f"{CLEAR_LINE}iteration 1/200, the first\r")
        for iteration, seconds in ((1, 8.0), (2, 1.0)):
            flight.end_iteration(iteration, seconds)
            line.step(dataclasses.replace(REPORT, iteration=iteration, step_time_s=seconds))
        expected = "[                        ]   1% iteration 2/200 | loss 3.2500 | 12,346 tokens/s | 3m18s left"
        terminal.read(f"{CLEAR_LINE}{expected}"[:70])
        assert line.text() == f"{expected} | evaluation in 48s"
        print_line("a line")
        terminal.read(f"{CLEAR_LINE}a line\r\n")
        flight.enter("evaluate")
        line.show(1, 4)
        terminal.read(f"evaluating {format_bar(1, 4)} ")
        line.show(4, 4)
        assert line.text().startswith("evaluating ")
        assert "[" not in line.text()
    print("the end", file=terminal.stream, flush=True)
    assert terminal.read("the end\r\n").endswith(f"{CLEAR_LINE}the end\r\n")


def test_the_bytes_that_are_loaded_and_the_samples_that_are_indexed_are_a_bar() -> None:
    flight = FlightRecorder(phase="load")
    line = LiveLine(CONFIG, flight, True)
    line.show(30, 40)
    assert re.fullmatch(rf"loading the checkpoint {re.escape(format_bar(3, 4))} \d+s", line.text())
    line.show(40, 40)
    assert re.fullmatch(r"loading the checkpoint \d+s", line.text())
    flight.enter("setup")
    line.show_index("train", 10, 40)
    assert re.fullmatch(rf"building the train index {re.escape(format_bar(1, 4))} \d+s", line.text())
    line.show_index("train", 40, 40)
    assert re.fullmatch(r"setting up \d+s", line.text())


def test_the_figure_of_a_known_peak_and_the_next_checkpoint_are_shown() -> None:
    checkpoint = dataclasses.replace(CONFIG.checkpoint, save_interval=20)
    line = LiveLine(dataclasses.replace(CONFIG, checkpoint=checkpoint), FlightRecorder(phase="forward"), True)
    line.step(dataclasses.replace(REPORT, iteration=15, step_time_s=60.0, mfu=0.415))
    assert line.text().endswith("| MFU 41.5% | 3h05m left | save in 5m00s | evaluation in 35m00s")
    line.step(dataclasses.replace(REPORT, iteration=200, step_time_s=60.0))
    assert line.text().endswith("| 0s left")


@pytest.mark.parametrize("is_reporter", [True, False])
def test_pipes_get_no_live_line(is_reporter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with LiveLine(CONFIG, FlightRecorder(), is_reporter) as line:
            assert not line.is_on
            print_line("a line")
    assert (tmp_path / "log").read_text() == "a line\n"


def test_durations_are_said_in_two_units() -> None:
    assert [format_duration(seconds) for seconds in (-1, 0.4, 59.9, 60, 3599, 3600, 86400, 10**6)] == [
        *("0s", "0s", "59s", "1m00s", "59m59s", "1h00m", "1d00h", "11d13h"),
    ]


def test_a_small_throughput_keeps_two_digits() -> None:
    line = format_first_step(REPORT, 200, log_throughput=True)
    assert " iteration        1/     200 | consumed samples:            4 |" in line
    assert " throughput per GPU (TFLOP/s/GPU): 0.0012 |" in line
    for value, text in ((459.12, "459.1"), (0.05, "0.1"), (0.049, "0.049"), (0.0, "0.0")):
        report = dataclasses.replace(REPORT, tflops_per_device=value)
        assert f"(TFLOP/s/GPU): {text} |" in format_first_step(report, 200, log_throughput=True)


def test_the_summary_of_the_arguments_is_short() -> None:
    lines = summarize(CONFIG).splitlines()
    assert lines[0] == " > model: 2 layers, hidden size 48, 6 heads, sequences of 40 tokens"
    assert len(lines) == 4
    assert lines[-1].endswith("arguments; --log-arguments prints them all")
