"""What a run says beside its checkpoints of itself and its passes, and two runs that are given one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.checkpoint_folder import saved_iterations
from megatron.cli import train
from megatron.cli.train import ContinuedRun
from megatron.cli.visualize_pipeline import main
from megatron.config.arguments import resolve_arguments
from megatron.config.printed_config import format_config
from megatron.core.errors import ConfigurationError, StorageError
from megatron.core.object_store import as_path
from megatron.core.pipeline_parallel.schedule_actions import Pass
from megatron.core.pipeline_parallel.timeline import read_timeline
from megatron.plotting.run_status import read_status
from megatron.training.initialize import LaunchEnvironment
from megatron.training.loggers.run_record import RunRecord
from tests.e2e.toy_run import DATA, assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training, fork_trainings
from tests.harness.object_faults import empty_memory_store

FLAGS = "--swiglu --hidden-dropout 0.1 --bf16 --train-iters 6 --save-interval 3"


def test_a_printed_configuration_is_the_same_run_and_its_record_goes_on_with_it(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    first = fork_training(toy_args(ours, FLAGS)).check()
    printed = tmp_path / "run.toml"
    printed.write_text(format_config(resolve_arguments(toy_args(theirs, FLAGS), 1).config))
    second = fork_training(["--config", str(printed), "--metrics-jsonl", str(theirs / "metrics.jsonl")]).check()
    assert len(first.iterations()) == 6
    assert exact_figures(second.metrics) == exact_figures(first.metrics)
    assert_same_checkpoints(newest(theirs / "checkpoints"), newest(ours / "checkpoints"))

    record = ours / "checkpoints" / "run_record"
    assert sorted(path.name for path in record.iterdir()) == [
        *("arguments.txt", "config.toml", "continue.toml", "data.json", "end.json", "environment.json"),
        "starts.jsonl",
    ]
    end = json.loads((record / "end.json").read_text())
    assert (end["iteration"], end["error"]) == (6, None)
    assert read_status(ours / "checkpoints").state == "finished"
    assert (record / "arguments.txt").read_text() in first.stdout
    environment = json.loads((record / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert (environment["processes_per_machine"], environment["folder"]) == (1, os.getcwd())
    files = json.loads((record / "data.json").read_text())
    content = DATA.with_name(DATA.name + ".idx").read_bytes()
    expected = hashlib.sha256(str(len(content)).encode() + content).hexdigest()
    assert files[f"{DATA}.idx"] == {"bytes": len(content), "sha256_of_blocks": expected, "covers": "all"}
    assert files.keys() == {f"{DATA}.idx", f"{DATA}.bin"}

    run = ContinuedRun.read(str(ours / "checkpoints"))
    resumed = fork_training([*run.words, "--train-iters", "8", "--override-opt-param-scheduler"]).check()
    assert " at iteration 6\n" in resumed.stdout
    assert [line["iteration"] for line in resumed.iterations()] == [*range(1, 9)]
    starts = [json.loads(line)["iteration"] for line in (record / "starts.jsonl").read_text().splitlines()]
    assert starts == [0, 6]
    assert json.loads((record / "end.json").read_text())["iteration"] == 8


def test_a_killed_run_is_known_to_have_crashed(tmp_path: Path) -> None:
    words = toy_args(tmp_path, "--train-iters 1000000 --eval-interval 1000000 --save-interval 1000000")
    folder = tmp_path / "checkpoints"
    with subprocess.Popen([sys.executable, "pretrain_gpt.py", *words], stdout=subprocess.DEVNULL) as process:
        try:
            metrics = folder / "metrics.jsonl"
            deadline = time.monotonic() + 120
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
            running = read_status(folder)
        finally:
            process.kill()
    assert (running.state, running.total) == ("running", 1000000)
    crashed = read_status(folder)
    assert (crashed.state, f"process {process.pid} on " in crashed.reason) == ("crashed", True)


def test_the_record_of_an_end_has_the_error_and_is_removed_at_the_next_start(tmp_path: Path) -> None:
    config = resolve_arguments(toy_args(tmp_path, "--train-iters 6"), 1).config
    Path(config.checkpoint.save or "").mkdir(parents=True)
    path = Path(config.checkpoint.save or "") / "run_record" / "end.json"
    for error, expected in (
        (None, None),
        (StorageError("the disk\nis full"), "the disk is full"),
        (ValueError("x" * 2000), f"ValueError: {'x' * 1000}"),
        (KeyError(), "KeyError"),
    ):
        record = RunRecord(config, LaunchEnvironment(), 0, print)
        assert not path.exists()
        record.end(3, error)
        written = json.loads(path.read_text())
        assert (written["iteration"], written["error"]) == (3, expected)


@pytest.mark.parametrize("saves", [True, False])
def test_what_goes_on_loads_all_that_is_saved_whatever_the_run_began_without(tmp_path: Path, saves: bool) -> None:
    flags = ["--load", str(tmp_path / "other"), "--no-load-optim", "--no-load-rng", "--finetune", "--ckpt-step", "5"]
    config = resolve_arguments(toy_args(tmp_path, "--train-iters 6", *flags), 1).config
    checkpoint = dataclasses.replace(config.checkpoint, no_save_optim=not saves, no_save_rng=not saves)
    Path(checkpoint.save or "").mkdir(parents=True)
    RunRecord(dataclasses.replace(config, checkpoint=checkpoint), LaunchEnvironment(), 0, print).close()
    record = Path(checkpoint.save or "") / "run_record" / "continue.toml"
    resolved = resolve_arguments(["--config", str(record)], 1).config.checkpoint
    assert (resolved.load, resolved.ckpt_step, resolved.finetune) == (checkpoint.save, None, False)
    assert (resolved.no_load_optim, resolved.no_load_rng) == (not saves, not saves)


def test_a_run_without_checkpoints_begins_again_as_it_began(tmp_path: Path) -> None:
    record = tmp_path / "run_record"
    record.mkdir()
    (record / "environment.json").write_text('{"folder": "/", "processes_per_machine": 2, "machines": 1}')
    run = ContinuedRun.read(str(tmp_path))
    assert run.words == ("--config", str(record / "config.toml"), "--save", str(tmp_path))
    assert (run.nproc, run.folder) == (2, Path("/"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ("[]", "list indices must be integers"),
        ("{}", "it lacks 'processes_per_machine'"),
        ('{"processes_per_machine": 0}', "processes_per_machine is 0"),
        ('{"processes_per_machine": "9"}', 'processes_per_machine is "9"'),
    ],
)
def test_a_folder_without_a_record_is_refused(text: str | None, reason: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run_record").mkdir()
        (tmp_path / "run_record" / "environment.json").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        ContinuedRun.read(str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.startswith(f"--resume {tmp_path}: ")
    assert reason in problem


def test_what_ended_a_session_early_does_not_end_the_next(tmp_path: Path, capsys) -> None:
    flags = ["--exit-interval", "3", "--exit-duration-in-mins", "9"]
    config = resolve_arguments(toy_args(tmp_path, "--train-iters 6", *flags), 1).config
    save = Path(config.checkpoint.save or "")
    save.mkdir(parents=True)
    RunRecord(config, LaunchEnvironment(), 0, print).close()
    assert not ContinuedRun.read(str(save)).limits  # without a checkpoint, the session starts again
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    run = ContinuedRun.read(str(save))
    assert run.limits == {"exit_interval": 3, "exit_duration_in_mins": 9}
    continued = resolve_arguments(run.words, 1).config.training
    assert (continued.exit_interval, continued.exit_duration_in_mins) == (None, None)
    assert train.main(["--resume", str(save), "--exit-interval=2", "--no-such-flag"]) == 2
    said, *_ = capsys.readouterr().err.splitlines()
    assert said == "--exit-duration-in-mins 9 of the last session is not continued; pass it again to stop early"


def test_a_run_on_several_machines_needs_to_be_told_of_them(tmp_path: Path, capsys) -> None:
    (tmp_path / "run_record").mkdir()
    record = {"folder": "/nowhere", "processes_per_machine": 8, "machines": 2}
    (tmp_path / "run_record" / "environment.json").write_text(json.dumps(record))
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert "the run used 2 nodes; pass --nnodes 2, --node-rank R" in capsys.readouterr().err


def test_words_beside_a_run_that_goes_on_are_said_to_be_seen_from_its_folder(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    folder, record = tmp_path / "project", tmp_path / "run_record"
    folder.mkdir()
    record.mkdir()
    environment = {"folder": str(folder), "processes_per_machine": 1, "machines": 1}
    (record / "environment.json").write_text(json.dumps(environment))
    monkeypatch.chdir(tmp_path)
    assert train.main(["--resume", str(tmp_path), "--config", "mine.toml"]) == 2
    said, *_, reason = capsys.readouterr().err.splitlines()
    assert said == f"relative paths are resolved from {folder}, where the run was started"
    assert reason.startswith("error: ")
    assert Path.cwd() == folder
    environment["folder"] = str(tmp_path / "gone")
    (record / "environment.json").write_text(json.dumps(environment))
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert f"{tmp_path / 'gone'} is missing" in capsys.readouterr().err


def test_a_run_in_an_object_store_has_its_record_there(tmp_path: Path) -> None:
    flags = ["--save", "memory://bucket/run", "--data-path", "memory://bucket/data", "--metrics-jsonl", "metrics.jsonl"]
    with empty_memory_store():
        for suffix in (".idx", ".bin"):
            as_path(f"memory://bucket/data{suffix}").write_bytes(DATA.with_name(DATA.name + suffix).read_bytes())
        config = resolve_arguments([*toy_args(tmp_path, "--train-iters 6", save=False, data=False), *flags], 1).config
        for iteration in (0, 3):
            RunRecord(config, LaunchEnvironment(), iteration, print).close()
        record = as_path("memory://bucket/run/run_record")
        assert sorted(path.name for path in record.iterdir()) == [
            *("arguments.txt", "config.toml", "continue.toml", "data.json", "environment.json", "starts.jsonl"),
        ]
        starts = [json.loads(line)["iteration"] for line in (record / "starts.jsonl").read_text().splitlines()]
        assert starts == [0, 3]
        content = DATA.with_name(DATA.name + ".bin").read_bytes()
        files = json.loads((record / "data.json").read_text())
        assert files.keys() == {"memory://bucket/data.idx", "memory://bucket/data.bin"}
        assert files["memory://bucket/data.bin"]["sha256_of_blocks"] == digest_of_blocks(content)

        begun = ContinuedRun.read("memory://bucket/run")
        assert begun.words == ("--config", f"{record}/config.toml", "--save", "memory://bucket/run")
        as_path("memory://bucket/run/latest_checkpointed_iteration.txt").write_bytes(b"3")
        saved = ContinuedRun.read("memory://bucket/run")
        assert saved.words[-2:] == ("--load", "memory://bucket/run")
        resumed = resolve_arguments(list(saved.words), 1).config
        assert resumed.data.data_path == ("memory://bucket/data",)
        assert resumed.checkpoint == dataclasses.replace(config.checkpoint.resumed(), load="memory://bucket/run")


def digest_of_blocks(content: bytes) -> str:
    """Return the checksum of a file's size and of 16 blocks of 64 KiB, spread evenly."""
    size, length = len(content), 2**16
    step = max(length, (size - length) // 15)
    blocks = b"".join(content[start : start + length] for start in range(0, size, step))
    return hashlib.sha256(str(size).encode() + blocks).hexdigest()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://bucket/run", "--resume memory://bucket/run: memory://bucket/run/run_record/environment.json "),
        ("s3://id:hunter2@bucket/run", "--resume: s3://*** contains a credential or a port"),
        ("https://host/run", "--resume: https:// is not a supported object store"),
    ],
)
def test_a_url_without_a_record_is_refused(url: str, said: str, capsys) -> None:
    with empty_memory_store():
        assert train.main(["--resume", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("iterations", "more", "recorded"),
    [
        (1, "", 1),
        pytest.param(3, "", 2, marks=pytest.mark.long),
        pytest.param(4, "--iterations-to-skip 0", 3, marks=pytest.mark.long),
        (3, "--iterations-to-skip 0 1", 3),
    ],
)
def test_the_passes_of_a_pipeline_are_recorded_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], iterations: int, more: str, recorded: int
) -> None:
    path = tmp_path / "new" / "schedule.json"
    flags = f"--train-iters {iterations} --eval-iters 0 --lr-warmup-iters 0 --cpu-gemm-backend mkl {more}"
    layout = "--pipeline-model-parallel-size 2 --global-batch-size 6"
    plain = fork_training(toy_args(tmp_path / "plain", flags, layout, save=False), 2)
    words = toy_args(tmp_path / "run", flags, layout, "--record-schedule", path, save=False)
    run = fork_training(words, 2).check()
    assert f"wrote {path}: the passes of iteration {recorded};" in run.stdout
    assert run.losses() == plain.losses()
    timeline = read_timeline(path)
    assert (timeline.pipeline_size, timeline.num_microbatches) == (2, 3)
    for rank in timeline.ranks:
        kinds = [action.kind for action in rank.actions]
        assert (kinds.count(Pass.FORWARD), kinds.count(Pass.BACKWARD)) == (3, 3)
    # The second stage cannot begin before the first has ended its first pass.
    assert timeline.ranks[1].starts[0] >= timeline.ranks[0].ends[0]
    assert main(["--recorded", str(path)]) == 0
    assert capsys.readouterr().out.count("rank ") >= 2


# Long enough that the one does not end before the other has looked.
TWO_JOBS_FLAGS = "--train-iters 120 --lr-decay-iters 60 --save-interval 20 --keep-last 2 --eval-interval 60"


def refusals(run: ForkedRun) -> list[str]:
    return [line for line in run.errors[0].splitlines() if line.startswith("error: ")]


def start_two(folder: Path, nproc: int, flags: str) -> None:
    """Start the same command line twice at one moment, and compare what is left with that of a run alone."""
    args = toy_args(folder, TWO_JOBS_FLAGS, flags)
    runs = fork_trainings([args, args], nproc)
    assert sorted(run.statuses for run in runs) == [(0,) * nproc, (2,) * nproc]
    winner, loser = sorted(runs, key=lambda run: run.statuses)
    (reason,) = refusals(loser)
    assert reason.startswith(f"error: --save {folder / 'checkpoints'} is in use by a training run on ")
    assert "[before the start of training step]" not in loser.stdout
    assert [line["iteration"] for line in winner.iterations()] == list(range(1, 121))
    assert saved_iterations(folder / "checkpoints") == [100, 120]
    assert leftovers(folder / "checkpoints") == []
    assert "Traceback" not in loser.errors[0]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("num_rounds", "nproc", "flags"),
    [
        pytest.param(1, 1, "", id="once"),
        pytest.param(20, 1, "", id="20-times", marks=pytest.mark.long),
        pytest.param(20, 2, "--async-save --use-distributed-optimizer", id="dp2-20-times", marks=pytest.mark.long),
    ],
)
def test_of_two_jobs_on_one_folder_exactly_one_runs(num_rounds: int, nproc: int, flags: str, tmp_path: Path) -> None:
    for number in range(num_rounds):
        start_two(tmp_path / str(number), nproc, flags)


@pytest.mark.long
def test_two_jobs_with_one_metrics_file_are_not_mixed(tmp_path: Path) -> None:
    shared = f"{TWO_JOBS_FLAGS} --metrics-jsonl {tmp_path / 'figures.jsonl'}"
    several = [toy_args(tmp_path / name, shared) for name in ("one", "other")]
    runs = fork_trainings(several, 1)
    assert sorted(run.statuses for run in runs) == [(0,), (2,)]
    winner, loser = sorted(runs, key=lambda run: run.statuses)
    (reason,) = refusals(loser)
    assert reason.startswith(f"error: --metrics-jsonl {tmp_path / 'figures.jsonl'} is in use by a training run on ")
    alone = fork_training(toy_args(tmp_path / "alone", TWO_JOBS_FLAGS)).check()
    assert exact_figures(winner.metrics) == exact_figures(alone.metrics)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["figures.jsonl"]


def test_an_evaluation_without_a_folder_of_its_own_runs_beside_a_run(tmp_path: Path) -> None:
    training = toy_args(tmp_path, TWO_JOBS_FLAGS, "--train-iters 80")
    fork_training([*training, "--exit-interval", "20"]).check()
    looking = toy_args(tmp_path, "--train-iters 80 --lr-decay-iters 60 --skip-train", save=False)
    both = fork_trainings([training, [*looking, "--load", str(tmp_path / "checkpoints")]], 1)
    assert [len(run.check().iterations()) for run in both] == [80, 0]
