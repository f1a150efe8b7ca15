"""The lines of a run's log, at its start and for each iteration, and the live line of a terminal."""

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
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.config.printed_config import format_config, given_arguments, summarize
from megatron.config.run_config import RunConfig
from megatron.core.console import CLEAR_LINE, format_bar, format_duration, print_line
from megatron.core.datasets import DatasetSplits
from megatron.core.device import Device
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training import SampleTargets
from megatron.training.callbacks import live_line
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.initialize import Runtime
from megatron.training.loggers.log_lines import (
    IntervalAverage,
    LogInterval,
    StepReport,
    choose_log_interval,
    format_brief_step,
    format_evaluation,
    format_memory,
    format_step,
    pinned_memory_told,
)
from megatron.training.loggers.startup_lines import (
    describe_batch_and_tokenizer,
    describe_buckets,
    describe_samples,
    log_arguments,
)
from megatron.training.model_setup import build_model_and_optimizer
from tests.e2e.megatron_lines import parse
from tests.unit.config.command_lines import MINIMAL

STEP = StepReport(
    iteration=20,
    consumed_samples=80,
    global_batch_size=4,
    num_tokens=96.0,
    lm_loss=4.918365,
    learning_rate=1.5e-4,
    next_learning_rate=2.0e-4,
    loss_scale=131072.0,
    next_loss_scale=131072.0,
    grad_norm=1.529,
    num_zeros=None,
    params_norm=None,
    is_skipped=False,
    step_time_s=0.0115,
    tokens_per_second=8347.8,
    tflops_per_device=0.01,
    mfu=None,
    sample_ids_hash="0123456789abcdef",
)


def averaged(*steps: StepReport) -> IntervalAverage:
    average = IntervalAverage()
    for step in steps:
        average.add(step)
    return average


def test_step_line_is_megatrons() -> None:
    line = format_step(STEP, averaged(STEP), 200, log_throughput=False)
    assert line[len(" [2026-11-22 03:16:32]") :] == (
        " iteration       20/     200 | consumed samples:           80 | elapsed time per iteration (ms): 11.5 |"
        " learning rate: 2.000000E-04 | global batch size:     4 | lm loss: 4.918365E+00 | loss scale: 131072.0 |"
        " grad norm: 1.529 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_throughput_and_utilization_are_those_of_all_iterations_since_the_last_line() -> None:
    fast = dataclasses.replace(STEP, step_time_s=1.0, tflops_per_device=400.0, mfu=0.4)
    slow = dataclasses.replace(STEP, step_time_s=3.0, tflops_per_device=100.0, mfu=0.1)
    line = format_step(slow, averaged(fast, slow), 200, log_throughput=True)
    assert "(ms): 2000.0 | throughput per GPU (TFLOP/s/GPU): 175.0 | MFU: 17.5% | learning rate" in line


def test_skipped_iterations_contribute_no_loss() -> None:
    skipped = dataclasses.replace(STEP, is_skipped=True, lm_loss=99.0, grad_norm=None)
    assert "lm loss: 4.918365E+00" in format_step(STEP, averaged(skipped, STEP, skipped), 200, log_throughput=False)
    line = format_step(skipped, averaged(skipped), 200, log_throughput=False)
    assert "lm loss" not in line
    assert "grad norm" not in line
    assert "number of skipped iterations:   1 |" in line


def test_evaluation_is_framed() -> None:
    above, line, below = format_evaluation("iteration 40 on test set", 2.5).split("\n")
    assert line == (
        " validation loss at iteration 40 on test set | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |"
    )
    assert above == below == "-" * len(above)


def test_a_decoupled_learning_rate_follows_the_common_one() -> None:
    step = dataclasses.replace(STEP, next_decoupled_learning_rate=5.0e-4)
    line = format_step(step, averaged(step), 200, log_throughput=False)
    assert " learning rate: 2.000000E-04 | decoupled learning rate: 5.000000E-04 | global batch size:" in line


def test_memory_that_a_save_has_pinned_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = iter([5 * 2**18, 5 * 2**19, 5 * 2**19, 5 * 2**19])
    monkeypatch.setattr(Device, "pinned_bytes", lambda self: next(pinned))
    for is_first in (True, True, False):
        state = SimpleNamespace(rank=3, dp_cp=SimpleNamespace(is_first=is_first))
        with pinned_memory_told(SimpleNamespace(device=Device("cuda"), state=state), 20):
            pass
    line = capsys.readouterr().out
    assert line == "[Rank 3] (after 20 iterations) pinned host memory of the node (MB): 2.50\n"
    assert parse(line) == ["pinned memory"]


def test_the_memory_line_has_what_all_processes_use_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = r"allocated: [\d.]+ \| max allocated: [\d.]+ \| reserved: [\d.]+ \| max reserved: \d+\.\d"
    plain = rf"\[Rank 3\] \(after 20 iterations\) memory \(MB\) \| {figures}"
    device = Device("cpu")
    assert re.fullmatch(plain, format_memory(3, 20, device))
    monkeypatch.setattr(Device, "used_bytes", lambda self: 3 * 2**19)
    line = format_memory(3, 20, device, with_device=True)
    assert re.fullmatch(rf"{plain} \| total device memory used: 1\.50", line)
    monkeypatch.setattr(Device, "pinned_bytes", lambda self: 5 * 2**18)
    assert format_memory(3, 20, device, with_device=True) == line
    parse(line.removesuffix(" | total device memory used: 1.50"))
    monkeypatch.setattr(Device, "used_bytes", lambda self: None)
    assert re.fullmatch(plain, format_memory(3, 20, device, with_device=True))


FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 2 --global-batch-size 12 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 51
"""


def configure(flags: str = "") -> RunConfig:
    config = resolve_arguments(f"{FLAGS} {flags}".split(), 1, needs_files=False).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=52))


def test_the_batch_size_is_constant_or_ramped_up_or_has_no_line() -> None:
    tokenizer = "> building NullTokenizer tokenizer ..."
    constant = "setting number of micro-batches to constant 6"
    assert describe_batch_and_tokenizer(configure()).splitlines() == [constant, tokenizer]
    ramped = (
        "will use batch size rampup starting from global batch size 4 to global batch size 12 with batch size "
        "increments 4 over 100 samples."
    )
    assert describe_batch_and_tokenizer(configure("--rampup-batch-size 4 4 100")).splitlines() == [ramped, tokenizer]
    stepped = "--step-batch-size-schedule 0:4,480:12"
    assert describe_batch_and_tokenizer(configure(stepped)).splitlines() == [tokenizer]


def test_many_buckets_are_counted_and_listed_where_everything_is_asked_for() -> None:
    config = configure("--ddp-bucket-size 1000")
    # The flag would be turned off for one replica, and there would be one bucket.
    config = dataclasses.replace(config, ddp=dataclasses.replace(config.ddp, overlap_grad_reduce=True))
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    (buffer,) = parts.ddp_chunks[0].grad_buffers
    count = len(buffer.buckets)
    assert count > 8
    first = f"Number of buckets for gradient all-reduce / reduce-scatter: {count}"
    assert describe_buckets(parts.ddp_chunks, state, False) == first
    everything = describe_buckets(parts.ddp_chunks, state, True)
    assert everything is not None
    lines = everything.splitlines()
    assert lines[0] == first
    assert [line.split(" (")[0] for line in lines if line.startswith("Params")] == [
        f"Params for bucket {number}" for number in range(1, count + 1)
    ]
    names = {line.removeprefix("\tmodule.") for line in lines if line.startswith("\t")}
    assert names == {name for name, _ in parts.chunks[0].named_parameters()}


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
        terminal.read(f"{CLEAR_LINE}iteration 1/200, the first, ")
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
    line = format_alone(REPORT)
    assert " iteration        1/     200 | consumed samples:            4 |" in line
    assert " throughput per GPU (TFLOP/s/GPU): 0.0012 |" in line
    for value, text in ((459.12, "459.1"), (0.05, "0.1"), (0.049, "0.049"), (0.0, "0.0")):
        report = dataclasses.replace(REPORT, tflops_per_device=value)
        assert f"(TFLOP/s/GPU): {text} |" in format_alone(report)


def format_alone(report: StepReport) -> str:
    average = IntervalAverage()
    average.add(report)
    return format_step(report, average, 200, log_throughput=True)


def test_a_brief_log_lists_the_arguments_that_differ_from_their_defaults() -> None:
    words = ["--data-path", *("a/long/name/of/data" for _ in range(20)), "--bf16", "--swiglu"]
    words = [word for word in MINIMAL if word != "--mock-data"] + words
    config = resolve_arguments(words, 4, needs_files=False, is_train_command=True).config
    lines = summarize(config).splitlines()
    assert lines[:4] == [
        " > model: 2 layers, hidden size 48, 6 heads, sequences of 40 tokens, bfloat16",
        " > run: 10 iterations of 8 samples in micro-batches of 2, 4 processes (DP 4)",
        " > checkpoints: nowhere",
        " > arguments that differ from their defaults (--log-arguments prints all):",
    ]
    assert max(map(len, lines)) <= 120
    listed = " ".join(lines[4:]).split()
    assert {"--num-layers", "--lr", "--bf16", "--swiglu", "--mock-data"} - set(listed) == {"--mock-data"}
    assert not {"--log-interval", "--hidden-dropout", "--seed"} & set(listed)
    assert listed[listed.index("--data-path") + 5] == "…"
    assert (
        summarize(config, "d/run_record/arguments.txt")
        .splitlines()[3]
        .endswith("(all are in d/run_record/arguments.txt):")
    )


def test_a_brief_log_of_a_continued_run_lists_no_derived_values(tmp_path: Path) -> None:
    first = resolve_arguments([*MINIMAL, "--kv-channels", "16"], 1, is_train_command=True).config
    (tmp_path / "continue.toml").write_text(format_config(first))
    words = ["--config", f"{tmp_path}/continue.toml", "--save", "d"]
    again = resolve_arguments(words, 1, is_train_command=True).config
    assert again.model.ffn_hidden_size == 4 * 48
    assert [*given_arguments(first), "--save d"] == given_arguments(again)
    assert "--kv-channels 16" in given_arguments(first)


@pytest.mark.parametrize(("below", "told"), [(400, "309 for validation, 9 for testing"), (0, "3,200 for validation")])
def test_samples_that_every_evaluation_reads_are_counted_once(below: int, told: str) -> None:
    datasets = DatasetSplits(None, *(SamplesWithLength(size) for size in (309, 9)))  # type: ignore[arg-type]
    line = describe_samples(datasets, SampleTargets(0, 3200, 400, one_epoch_below=below))
    assert line.startswith(f" > samples: {told}")


class SamplesWithLength:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def test_arguments_are_summarized_only_under_the_train_command() -> None:
    texts = []
    for is_train_command, more in (
        (True, []),
        (True, ["--log-arguments"]),
        (True, ["--log-megatron-lines"]),
        (False, []),
    ):
        lines: list[str] = []
        words = [*MINIMAL, "--save", "d", *more]
        log_arguments(resolve_arguments(words, 1, is_train_command=is_train_command).config, lines.append)
        texts.append("\n".join(lines))
    blocks = ["arguments -----" in text for text in texts]
    assert blocks == [False, True, True, True]
    assert ["arguments that differ" in text for text in texts] == [True, True, False, False]
    assert "d/run_record/arguments.txt" in texts[0]


@pytest.mark.parametrize(
    ("iterations", "step_s", "expected"),
    [
        # Short runs have ten lines, whatever a step takes.
        (20, 0.05, 2),
        (7, 0.01, 1),
        (60, 0.2, 5),
        # A line about every 5 seconds.
        (1000, 0.1, 50),
        (400, 0.15, 20),
        # Long runs: a hundred lines, but at least one every minute.
        (400, 20.0, 2),
        (10_000, 0.4, 100),
        (10_000_000, 0.4, 100),
        (10_000_000, 0.001, 50_000),
    ],
)
def test_the_log_interval_follows_from_the_length_of_the_run_and_the_step_time(
    iterations: int, step_s: float, expected: int
) -> None:
    assert choose_log_interval(iterations, step_s) == expected


def test_a_chosen_interval_follows_the_step_time_but_does_not_flicker() -> None:
    interval, world = LogInterval(0, 1000, 1000), create_parallel_state().world
    lines = []
    for iteration in range(1, 1001):
        average = IntervalAverage()
        step_s = 20.0 if iteration == 1 else 0.1 if iteration < 500 else 0.06 if iteration < 700 else 5.0
        average.add(dataclasses.replace(REPORT, step_time_s=step_s))
        if interval.is_due(iteration):
            lines.append(iteration)
            interval.adapt(average, world)
    # The first step is slow, a step of 0.06 s is nearly as fast as one of 0.1 s, and then the machine gets busy.
    assert lines == [1, 2, *range(50, 701, 50), *range(710, 1001, 10)]


def test_a_given_interval_is_kept() -> None:
    interval, average = LogInterval(7, 20, 20), IntervalAverage()
    average.add(dataclasses.replace(REPORT, step_time_s=100.0))
    interval.adapt(average, create_parallel_state().world)
    assert [iteration for iteration in range(1, 21) if interval.is_due(iteration)] == [7, 14]
    chosen = LogInterval(0, 64, 64)
    chosen.value = 5
    assert [iteration for iteration in range(50, 65) if chosen.is_due(iteration)] == [50, 55, 60, 64]


def test_a_brief_line_fits_the_screen_and_says_what_happened() -> None:
    average = IntervalAverage()
    for is_skipped in (False, False):
        average.add(dataclasses.replace(REPORT, step_time_s=1.0, is_skipped=is_skipped))
    report = dataclasses.replace(REPORT, iteration=120, step_time_s=1.0, tokens_per_second=9000.0, learning_rate=1e-3)
    line = format_brief_step(report, average, 200, log_throughput=False)
    assert line == (
        " iteration 120/200 | lm loss: 3.2500 | lr: 1.000E-03 | grad norm: 2.000 | step: 1,000.0 ms | 9,000 tokens/s"
        " | 1m20s left"
    )
    assert len(line) <= 120
    average.add(dataclasses.replace(REPORT, step_time_s=1.0, is_skipped=True))
    report = dataclasses.replace(report, next_loss_scale=2048.0, mfu=0.4)
    more = format_brief_step(report, average, 200, log_throughput=True).removeprefix(line[:60])
    assert "loss scale: 2048.0 | number of skipped iterations: 1" in more
    assert "TFLOP/s per GPU | MFU: " in more


def test_an_evaluation_of_a_brief_log_is_one_line() -> None:
    line = format_evaluation("iteration 30 on validation set", 6.5, is_brief=True)
    assert line == " validation loss at iteration 30 on validation set | lm loss value: 6.5000 | lm loss PPL: 665.1"


def test_a_brief_log_without_a_terminal_prints_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "SIGN_OF_LIFE_S", 0.1)
    monkeypatch.setattr(live_line, "_REDRAW_S", 0.01)
    config = resolve_arguments(MINIMAL, 1, is_train_command=True).config
    flight = FlightRecorder(phase="save")
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with LiveLine(config, flight, is_reporter=True):
            deadline = time.monotonic() + 20.0
            while (tmp_path / "log").read_text().count("\n") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    lines = (tmp_path / "log").read_text().splitlines()
    assert set(lines) == {" ... saving a checkpoint 0s"}
