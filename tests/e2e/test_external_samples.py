"""A script of the user's own makes the samples (--dataloader-type external)."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training
from tests.harness.training_run import run_training

SCRIPT = '''
import sys

import numpy as np

import pretrain_gpt
from megatron.core.datasets.blended_dataset_builder import DatasetSplits
from megatron.training.arguments import parse_arguments_or_exit
from megatron.training.preflight import prepare_data_or_exit
from megatron.training.refusal import launch_environment_or_exit


class Counting:
    """Sample i counts on from i."""

    def read_microbatches(self, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size):
        while True:
            first = consumed_samples + data_parallel_rank * micro_batch_size
            yield [self.sample(first + i) for i in range(micro_batch_size)]
            consumed_samples += micro_batch_size * data_parallel_size

    def sample(self, number):
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


launch = launch_environment_or_exit()
config = parse_arguments_or_exit(sys.argv[1:], launch.world_size, launch.rank)
tokenizer = prepare_data_or_exit(config, launch, provide)
from megatron.training.pretrain import pretrain

sys.exit(pretrain(config, launch, tokenizer, pretrain_gpt.provide_model, provide, pretrain_gpt.forward_step))
'''


def test_samples_of_the_users_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    flags = "--dataloader-type external --train-iters 6 --eval-interval 3"

    def args(name: str, more: str = "") -> list[str]:
        words = toy_args(tmp_path / name, flags, more, data=False)
        place = words.index("--split")
        return words[:place] + words[place + 2 :]

    root = {"PYTHONPATH": str(Path(__file__).parents[2]), "MEGATRON_DEVICE": "cpu"}
    whole = run_training(args("whole"), env=root, script=str(script)).check()
    assert [line["iteration"] for line in whole.iterations()] == list(range(1, 7))
    assert [line["iteration"] for line in whole.evaluations("validation")] == [3, 6]
    run_training(args("parts", "--exit-interval 4"), env=root, script=str(script)).check()
    parts = run_training(args("parts"), env=root, script=str(script)).check()
    assert exact_figures(parts.metrics) == exact_figures(whole.metrics)


def test_the_projects_script_has_none(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--dataloader-type external"))
    assert run.statuses == (2,)
    assert run.errors[0].startswith("error: --dataloader-type external: this script makes no samples of its own")
