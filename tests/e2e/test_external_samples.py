"""A script of the user's own makes the samples (--dataloader-type external)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training
from tests.harness.training_run import CommandResult, run_training

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
from megatron.training.pretrain import pretrain

sys.exit(pretrain(config, launch, tokenizer, pretrain_gpt.provide_model, provide, pretrain_gpt.forward_step))
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
    reason = "error: micro-batch 4 that the caller makes: reading it failed with ValueError: shard 3 is damaged"
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"{reason} ({tmp_path / 'own.py'}, line ")


def test_the_projects_script_has_none(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--dataloader-type external"))
    assert run.statuses == (2,)
    assert run.errors[0].startswith("error: --dataloader-type external: this script makes no samples of its own")
