"""Samples of a user's own script, for filling in the middle, and those that a tool shows for a step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.inspect_batch import main
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.training_run import CommandResult, read_metrics, run_training

SCRIPT = '''
import os
import sys

import numpy as np

import pretrain_gpt
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.training.exit_reason import parse_arguments_or_exit
from megatron.training.preflight import prepare_data_or_exit
from megatron.training.exit_reason import launch_environment_or_exit


class Counting:
    """Sample i counts on from i; the samples of a damaged shard cannot be made."""

    def read_microbatches(self, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size):
        while True:
            first = consumed_samples + data_parallel_rank * micro_batch_size
            yield [self.sample(first + i) for i in range(micro_batch_size)]
            consumed_samples += micro_batch_size * data_parallel_size

    def sample(self, number):
        if number == DAMAGED:
            raise ValueError("shard 3 is damaged")
        text = (number + np.arange(25)) % 127
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": np.ones(24, np.float32),
            "position_ids": np.arange(24),
        }


class Builder:
    def check(self):
        pass

    def build(self):
        return DatasetSplits(train=Counting(), valid=Counting(), test=None)


def provide(config, tokenizer, targets, report):
    return Builder()


DAMAGED = int(os.environ.get("DAMAGED", "-1"))
launch = launch_environment_or_exit()
config = parse_arguments_or_exit(sys.argv[1:], launch.world_size, launch.rank)
tokenizer = prepare_data_or_exit(config, launch, provide)
from megatron.training.pretraining import pretrain_from_config

parts = (pretrain_gpt.provide_model, provide, pretrain_gpt.forward_step)
sys.exit(pretrain_from_config(config, launch, tokenizer, *parts))
'''


def own_args(folder: Path, more: str = "") -> list[str]:
    words = toy_args(folder, "--dataloader-type external --train-iters 6 --eval-interval 3", more, data=False)
    place = words.index("--split")
    return words[:place] + words[place + 2 :]


def run_script(folder: Path, name: str, **environment: str) -> CommandResult:
    script = folder / "own.py"
    script.write_text(SCRIPT)
    root = {"PYTHONPATH": str(Path(__file__).parents[2]), "MEGATRON_DEVICE": "cpu"}
    return run_training(own_args(folder / name), env=root | environment, script=str(script))


def run_in_rank(argv: Sequence[str], faults: Faults) -> int:
    """Run the script in a forked rank, where torch is loaded already; it ends by SystemExit."""
    sys.argv = ["own.py", *argv]
    exec(compile(SCRIPT, "own.py", "exec"), {"__name__": "__main__"})
    raise AssertionError("the script ends the program")


def test_samples_of_the_users_own(tmp_path: Path) -> None:
    whole = run_script(tmp_path, "whole").check()
    assert [line["iteration"] for line in whole.iterations()] == list(range(1, 7))
    assert [line["iteration"] for line in whole.evaluations("validation")] == [3, 6]
    fork_training(own_args(tmp_path / "parts", "--exit-interval 4"), program=run_in_rank).check()
    parts = fork_training(own_args(tmp_path / "parts"), program=run_in_rank).check()
    assert exact_figures(parts.metrics) == exact_figures(whole.metrics)


@pytest.mark.long
def test_samples_that_cannot_be_made_end_the_run_in_one_line(tmp_path: Path) -> None:
    run = run_script(tmp_path, "damaged", DAMAGED="9")
    assert run.returncode == 2
    reason = "error: the caller's micro-batch 4:  reading it failed with ValueError: shard 3 is damaged"
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"{reason} ({tmp_path / 'own.py'}, line ")


def test_the_projects_script_has_none(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--dataloader-type external"))
    assert run.statuses == (2,)
    assert run.errors[0].startswith("error: --dataloader-type external: this script does not create samples itself")


TASKS = """
    --fim-data --fim-spm-rate 0.3 --fim-prefix-token 120 --fim-middle-token 121 --fim-suffix-token 122
    --hidden-dropout 0 --attention-dropout 0 --train-iters 6 --eval-iters 0
"""


def test_tasks_are_the_same_at_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    whole = fork_training(toy_args(tmp_path, TASKS, "--save-interval 3")).check()
    assert (
        " > filling in the middle of 50% of documents, 30% of these with the suffix first; tokens: prefix 120, "
        "suffix 122, middle 121, pad 0\n"
    ) in whole.stdout
    for nproc, layout in ((2, "--tensor-model-parallel-size 2"), (2, "")):
        metrics = tmp_path / f"{layout or 'data'}.jsonl"
        run = fork_training([*toy_args(tmp_path, TASKS, layout, save=False), "--metrics-jsonl", metrics], nproc).check()
        np.testing.assert_allclose(run.losses(), whole.losses(), rtol=2e-5)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    rest = toy_args(tmp_path, TASKS, f"--load {tmp_path / 'checkpoints'} --metrics-jsonl", tmp_path / "r", save=False)
    assert exact_figures(fork_training(rest).check().iterations()) == exact_figures(whole.iterations())[3:]
    untouched = toy_args(tmp_path, TASKS, "--fim-rate 1e-9 --metrics-jsonl", tmp_path / "untouched", save=False)
    assert fork_training(untouched).check().losses()[0] != whole.losses()[0]


def test_a_special_token_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    done = run_training(toy_args(tmp_path, "--fim-rate 0.5 --fim-middle-token 121 --fim-suffix-token 122"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --fim-prefix-token <fim_prefix>: the tokenizer cannot encode it (NullTokenizer"
    )
    assert done.stderr.endswith("set --fim-prefix-token to one of its special tokens\n")
    assert done.stderr.count("\n") == 1


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
        (["--step", "4"], "--step 4: the run has steps 1 to 3"),
        (["--step", "0"], "--step 0: the run has steps 1 to 3"),
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
    assert f"{prefix} is not the data that the run trained on" in capsys.readouterr().err
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
    assert done.stderr == f"error: {tmp_path} contains no checkpoint\n"
