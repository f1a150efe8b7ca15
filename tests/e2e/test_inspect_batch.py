"""The samples that a tool shows for a step are those that the step was trained on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.inspect_batch import main
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_training
from tests.harness.training_run import read_metrics

SCHEDULE = "--lr-warmup-iters 0 --lr-decay-iters 20"
OVERRIDE = "--override-opt-param-scheduler"
RAMP = f"--global-batch-size 8 --rampup-batch-size 4 2 24 {SCHEDULE}"


def write_text(prefix: Path, num_documents: int, seed: int) -> str:
    random = np.random.RandomState(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(num_documents):
            builder.add_document(np.append(random.randint(0, 127, random.randint(20, 60)), 127))
        builder.finalize()
    return str(prefix)


def show(folder: Path, step: int, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["--load", str(folder / "checkpoints"), "--step", str(step), "--json", *flags])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def train(folder: Path, blend: list[str], *flags: str, num_processes: int = 1) -> None:
    args = toy_args(folder, RAMP, "--save-interval 4", *flags, data=False)
    fork_training([*args, "--data-path", *blend], num_processes).check()


@pytest.mark.parametrize("order", [pytest.param("single", marks=pytest.mark.long), "cyclic"])
def test_every_step_of_a_run_that_was_resumed(order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (write_text(tmp_path / "text" / name, 40 + i, i) for i, name in enumerate("abc"))
    kind = f"--dataloader-type {order} --train-iters 14"
    train(tmp_path, ["0.7", a, "0.3", b], kind, "--exit-interval 7")
    # The batch is another and, where that can be, so is the blend.
    blend = ["0.7", a, "0.3", b] if order == "cyclic" else ["0.2", b, "0.5", c, "0.3", a]
    train(tmp_path, blend, kind, "--global-batch-size 12 --rampup-batch-size 4 4 24", OVERRIDE, num_processes=2)
    metrics = read_metrics(tmp_path / "checkpoints" / "metrics.jsonl")
    lines = {line["iteration"]: line for line in metrics if "split" not in line}
    hashes = set()
    for step in range(1, 15):
        status, (head, *samples) = show(tmp_path, step, capsys)
        assert status == 0
        assert head["sample_ids_hash"] == head["recorded_hash"] == lines[step]["sample_ids_hash"]
        assert len(samples) == head["global_batch_size"] == lines[step]["global_batch_size"]
        hashes.add(head["sample_ids_hash"])
    assert len(hashes) == 14
    # Without the metrics file the checkpoints tell as much, except where the batch was changed between two of them.
    (tmp_path / "checkpoints" / "metrics.jsonl").unlink()
    for step in (1, 4, 7, 8, 12, 14):
        status, (head, *_) = show(tmp_path, step, capsys)
        assert (status, head["recorded_hash"]) == (0, None)
        assert head["sample_ids_hash"] == lines[step]["sample_ids_hash"]


def test_text_document_file_and_offset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_text(tmp_path / "text" / "a", 50, 0)
    train(tmp_path, [prefix], "--train-iters 3 --rampup-batch-size 4 4 24", num_processes=2)
    _, (_, *samples) = show(tmp_path, 3, capsys, "--tokens")
    assert [(sample["microbatch"], sample["data_parallel_rank"]) for sample in samples] == [(0, 0)] * 2 + [(0, 1)] * 2
    for sample in samples:
        read: list[int] = []
        for piece in sample["pieces"]:
            count = piece["end_token"] - piece["first_token"]
            tokens = np.fromfile(piece["file"], np.uint16, count, offset=piece["byte_offset"]).tolist()
            assert piece["text"] == " ".join(map(str, tokens))
            read += tokens
        assert read == sample["tokens"]
        assert len(read) == 25
    assert main(["--load", str(tmp_path / "checkpoints"), "--step", "3", "--max-samples", "1", "--width", "9"]) == 0
    shown = capsys.readouterr().out
    assert (
        f"(equal to the metrics file's)\n\nsample {samples[0]['sample']}: micro-batch 0, data-parallel rank 0; "
        in shown
    )
    assert f"data set 0 (weight 1): {prefix}, its sample {samples[0]['sample_of_data_set']} " in shown
    assert f"    {samples[0]['pieces'][0]['text'][:9] + '…'!r}\n" in shown


def test_a_step_that_is_still_to_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_text(tmp_path / "text" / "a", 50, 0)
    train(tmp_path, [prefix], "--train-iters 10 --exit-interval 5")
    _, (ahead, *_) = show(tmp_path, 9, capsys)
    assert ahead["recorded_hash"] is None
    train(tmp_path, [prefix], "--train-iters 10")
    _, (trained, *_) = show(tmp_path, 9, capsys)
    assert trained["recorded_hash"] == trained["sample_ids_hash"] == ahead["sample_ids_hash"]


def test_other_data_and_other_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_text(tmp_path / "text" / "a", 50, 0)
    train(tmp_path, [prefix], "--train-iters 3")
    checkpoints = tmp_path / "checkpoints"
    for flags, words in (
        (["--step", "4"], "--step 4: the run trains steps 1 to 3"),
        (["--step", "0"], "--step 0: the run trains steps 1 to 3"),
        (["--step", "1", "--metrics-jsonl", str(tmp_path / "no.jsonl")], "no.jsonl: there is no such file"),
        (["--step", "1", "--ckpt-step", "2"], "there is no checkpoint"),
    ):
        assert main(["--load", str(checkpoints), *flags]) == 2
        assert words in capsys.readouterr().err
    metrics = checkpoints / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"sample_ids_hash": "', '"sample_ids_hash": "0'))
    assert main(["--load", str(checkpoints), "--step", "2"]) == 1
    assert "step 2 was not trained on these samples" in capsys.readouterr().err
    write_text(tmp_path / "text" / "a", 50, 7)
    assert main(["--load", str(checkpoints), "--step", "1"]) == 2
    assert f"{prefix} is not the text that the run trained on" in capsys.readouterr().err
    shutil.rmtree(checkpoints)
    assert main(["--load", str(checkpoints), "--step", "1"]) == 2


def test_made_up_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = toy_args(tmp_path, "--mock-data --train-iters 3", SCHEDULE, data=False)
    place = args.index("--split")
    fork_training(args[:place] + args[place + 2 :]).check()
    status, (head, *samples) = show(tmp_path, 2, capsys)
    assert status == 0
    assert head["recorded_hash"] == head["sample_ids_hash"]
    assert [sample["prefix"] for sample in samples] == ["mock data"] * 4


def test_the_command(tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "inspect_batch.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--load", str(tmp_path), "--step", "1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path} holds no checkpoint\n"
