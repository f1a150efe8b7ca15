"""Training with checkpoints and data in an object store: file:// stands for one, as several ranks can see it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli import diff_checkpoints, inspect_checkpoint
from megatron.cli.train import ContinuedRun
from megatron.core.dist_checkpointing.index import read_index
from tests.e2e.toy_run import DATA, exact_figures, toy_args
from tests.harness.distributed import RankFailure
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import fork_training

SHORT = "--train-iters 6 --save-interval 2 --lr-decay-iters 6 --eval-iters 0 --keep-last 2"


def run_at_home(argv: Sequence[str], faults: Faults) -> int:
    """Train with a home folder beside the metrics: copies of objects are kept there."""
    os.environ["HOME"] = str(Path(argv[argv.index("--metrics-jsonl") + 1]).parent / "home")
    return run_with_faults(argv, faults)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two equal runs: one saved to a file system, one to a store, killed there and resumed."""
    folder = tmp_path_factory.mktemp("object_storage")
    local = fork_training(toy_args(folder, SHORT), nproc=2).check()
    url = f"file://{folder}/store/run"
    args = [*toy_args(folder, SHORT, save=False), "--save", url, "--load", url, "--metrics-jsonl", f"{folder}/metrics"]
    args += ["--data-path", f"file://{DATA}", "--data-cache-path", f"file://{folder}/store/cache"]
    tracker = folder / "store" / "run" / "latest_checkpointed_iteration.txt"
    with pytest.raises(RankFailure, match="died with exit code -9"):
        fork_training(args, 2, Faults(kill_at_checkpoint=4, tracker=str(tracker)), program=run_at_home)
    resumed = fork_training([*args, "--async-save"], nproc=2, program=run_at_home).check()
    assert f"loading checkpoint from {url} at iteration 4" in resumed.stdout
    assert exact_figures(local.iterations())[4:] == exact_figures(resumed.iterations())[-2:]
    return folder


def test_a_run_that_saves_to_a_store_and_is_killed_goes_on_bitwise(folder: Path, capsys) -> None:
    url = f"file://{folder}/store/run"
    assert diff_checkpoints.main([str(folder / "checkpoints"), url]) == 1
    said = capsys.readouterr().out
    assert "different: 1 difference\n" in said, said  # the name of the data
    assert f"data_path: ['{DATA}'] -> ['file://{DATA}']" in said, said
    assert inspect_checkpoint.main([url, "--verify"]) == 0, capsys.readouterr()
    assert "match their checksums" in capsys.readouterr().out


def test_the_index_of_the_data_is_in_the_store_too(folder: Path) -> None:
    names = sorted(path.name.partition("-")[2] for path in (folder / "store" / "cache").iterdir())
    assert "GPTDataset-train-description.txt" in names
    assert "GPTDataset-train-shuffle_index.npy" in names


def test_a_store_holds_what_the_indices_name_and_nothing_else(folder: Path) -> None:
    store = folder / "store" / "run"
    names = ["iter_0000004", "iter_0000006", store_tracker(store).name, "run_record"]
    assert sorted(path.name for path in store.iterdir()) == names
    assert store_tracker(store).read_text() == "6"
    for iteration in store.glob("iter_*"):
        shards = {path.name for path in iteration.glob("shard_*")}
        assert shards == set(read_index(iteration).files)
        assert len(shards) == 2


def test_a_run_in_a_store_goes_on_by_its_record(folder: Path, tmp_path: Path) -> None:
    url = f"file://{folder}/store/run"
    starts = (folder / "store" / "run" / "run_record" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in starts] == [0, 4]
    run = ContinuedRun.read(url)
    assert run.nproc * run.nnodes == 2
    words = [*run.words, "--train-iters", "8", "--metrics-jsonl", str(folder / "more"), "--save-interval", "8"]
    # The other tests read what this run would otherwise add.
    words += ["--save", f"file://{tmp_path}/more"]
    resumed = fork_training(words, nproc=2, program=run_at_home).check()
    assert f"loading checkpoint from {url} at iteration 6" in resumed.stdout
    assert [line["iteration"] for line in resumed.iterations()] == [7, 8]


def store_tracker(store: Path) -> Path:
    return store / "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--save s3:///x", "--save: s3:///x has no bucket; write s3://BUCKET/FOLDER"),
        ("--load s3://id:hunter2@bucket/x", "--load: s3://*** contains a credential or a port"),
        (
            "--save https://host/x",
            "--save: https:// is not a supported object store; supported are s3://, gs:// and az://",
        ),
        ("--save memory:/x", "--save: memory:/x lacks a slash; write memory://"),
        ("--save memory://x --ckpt-format torch", "--ckpt-format torch can only be written to a file system"),
        ("--save memory://x --log-progress", "--log-progress appends to a file next to checkpoints"),
        ("--tensorboard-dir memory://x", "--tensorboard-dir memory://...: object stores are not supported here"),
        ("--load memory://x --finetune", "--load memory://x does not exist, but --finetune needs a checkpoint"),
    ],
)
def test_what_no_store_can_do_is_refused_in_a_line(tmp_path: Path, words: str, line: str) -> None:
    run = fork_training(toy_args(tmp_path, words, save=False), nproc=1)
    assert run.statuses == (2,)
    said = [each for each in run.errors[0].splitlines() if each.strip()]
    assert any(line in each for each in said), said
    assert "Traceback" not in run.errors[0]
    assert "hunter2" not in run.errors[0] + run.outputs[0]
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["cache"])
