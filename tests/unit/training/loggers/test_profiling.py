"""Traces of chosen iterations, the ranges in them, and what a device is asked for."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.training.callbacks.profiling import Profiling
from megatron.training.initialize import Runtime, make_runtime
from tests.harness.forked_training import fork_training
from tests.harness.training_run import run_training

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--tokenizer-type", "NullTokenizer", "--vocab-size", "52"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "4", "--mock-data", "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--eval-iters", "0", "--log-interval", "1"),
)


@dataclass(frozen=True)
class ToldDevice(Device):
    """Be a CUDA device that writes down what it is told."""

    told: list[str] = field(default_factory=list)

    def start_profiler(self) -> None:
        self.told.append("start")

    def stop_profiler(self) -> None:
        self.told.append("stop")

    def synchronize(self) -> None:
        self.told.append("synchronize")

    def record_memory_history(self) -> None:
        self.told.append("record")

    def save_memory_history(self, path: str) -> None:
        self.told.append(path)


def config_of(*flags: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments((*FLAGS, *flags), world_size).config


def runtime_on(device: Device, config: RunConfig) -> Runtime:
    state = make_runtime(config, Device("cpu"))
    return Runtime(device, state.state, state.rng)


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]


@pytest.mark.full
def test_a_run_leaves_a_trace_of_the_chosen_ranks_and_iterations(tmp_path: Path) -> None:
    """The second rank of a pipeline alone, and one iteration of four."""
    flags = ("--pipeline-model-parallel-size", "2", "--profile", "--profile-step-start", "2", "--profile-step-end", "3")
    more = ("--profile-ranks", "1", "--tensorboard-dir", tmp_path / "board", "--record-memory-history")
    more = (*more, "--memory-snapshot-path", tmp_path / "snapshot.pickle")
    result = fork_training((*FLAGS, *flags, *more), 2).check()
    assert "on this CPU torch's profiler is used" in result.stdout
    assert "--record-memory-history has no effect on a CPU" in result.stdout
    assert not (tmp_path / "snapshot.pickle").exists()
    (trace,) = (tmp_path / "board").glob("*.pt.trace.json")
    assert trace.name == "rank1.iterations3-3.pt.trace.json"
    names = names_in(trace)
    for microbatch in range(4):
        assert names.count(f"forward of micro-batch {microbatch}, chunk 0") == 1
        assert names.count(f"backward of micro-batch {microbatch}, chunk 0") == 1
    assert names.count("layer 1") == 4
    assert "layer 0" not in names
    for part in ("forward-backward", "forward-compute", "all-grads-sync", "optimizer"):
        assert part in names


@pytest.mark.long
def test_a_run_that_ends_early_leaves_what_it_has(tmp_path: Path) -> None:
    flags = ("--profile", "--profile-step-start", "1", "--profile-step-end", "9", "--exit-interval", "2")
    run_training((*FLAGS, *flags, "--save", tmp_path / "saved", "--no-save-optim")).check()
    assert (tmp_path / "saved" / "rank0.iterations2.pt.trace.json").is_file()


def test_cuda_without_torchs_profiler_is_told_when_nsys_records(monkeypatch) -> None:
    device = ToldDevice("cuda")

    def ranges(record_shapes: bool) -> AbstractContextManager[None]:
        device.told.append("ranges")
        return nullcontext()

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", ranges)
    config = config_of("--profile", "--profile-step-start", "1", "--profile-step-end", "3")
    lines: list[str] = []
    profiling = Profiling(config, runtime_on(device, config), lines.append)
    for done in range(5):
        profiling.begin_iteration(done, [])
        assert profiling.is_open == (done in (1, 2))
        profiling.end_iteration(done + 1)
    profiling.close()
    assert device.told == ["start", "ranges", "synchronize", "stop"]
    assert lines == []


def test_a_run_that_has_none_of_the_iterations_says_so_once() -> None:
    config = config_of("--profile", "--profile-step-start", "7", "--profile-step-end", "9", "--profile-ranks", "0")
    lines: list[str] = []
    device = ToldDevice("cuda")
    profiling = Profiling(config, runtime_on(device, config), lines.append)
    profiling.begin_iteration(6, [])
    profiling.end_iteration(7)
    profiling.close()
    profiling.close()
    assert device.told == []
    assert lines == ["--profile: nothing was profiled: the run did not reach iterations 8 to 9"]


def test_the_history_of_memory_is_written_once_at_the_end(tmp_path: Path) -> None:
    config = config_of("--record-memory-history", "--memory-snapshot-path", str(tmp_path / "memory.pickle"))
    device = ToldDevice("cuda")
    profiling = Profiling(config, runtime_on(device, config), print)
    assert device.told == ["record"]
    profiling.close()
    profiling.close()
    assert device.told == ["record", str(tmp_path / "memory.pickle")]


def test_a_trace_that_cannot_be_written_costs_a_warning(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    config = config_of(
        "--profile", "--profile-step-start", "0", "--profile-step-end", "1", "--save", str(tmp_path / "a")
    )
    (tmp_path / "a").write_text("no folder")
    profiling = Profiling(config, runtime_on(Device("cpu"), config), lambda line: None)
    profiling.begin_iteration(0, [])
    profiling.end_iteration(1)
    assert "WARNING: cannot write" in capsys.readouterr().out


def test_without_a_folder_a_cpu_run_is_refused() -> None:
    config = config_of("--profile")
    with pytest.raises(ConfigurationError, match="add --tensorboard-dir DIR or --save DIR"):
        Profiling(config, runtime_on(Device("cpu"), config), print)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--profile", "--use-pytorch-profiler"), "--profile has no folder"),
        (("--profile", "--profile-step-start", "12"), "the range of iterations 13 to 12 is empty"),
        (("--profile-ranks", "0", "4"), "--profile-ranks 4: the run has ranks 0 to 0"),
    ],
)
def test_what_cannot_be_profiled_is_refused(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(*flags)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_flags_that_count_for_nothing_are_said() -> None:
    flags = ("--profile-step-start", "4", "--use-pytorch-profiler", "--memory-snapshot-path", "a.pickle")
    notes = resolve_arguments((*FLAGS, *flags), 1).notes
    assert [note for note in notes if "without --" in note] == [
        "--profile-step-start 4 has no effect without --profile",
        "--use-pytorch-profiler has no effect without --profile",
        "--memory-snapshot-path a.pickle has no effect without --record-memory-history",
    ]
