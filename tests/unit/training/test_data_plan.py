"""How many samples a run asks of its data sets, and steps found from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.errors import CheckpointError
from megatron.training.data_plan import SampleTargets, sample_targets
from megatron.training.step_position import read_saved_run
from tests.unit.config.command_lines import MINIMAL

RUN = "--train-iters 21 --eval-interval 5 --eval-iters 3"


def config_of(flags: str) -> RunConfig:
    return resolve_arguments([*MINIMAL, *flags.split()], world_size=1).config


def test_a_run_from_its_beginning() -> None:
    assert sample_targets(config_of(f"{RUN} --global-batch-size 4")) == SampleTargets(84, 5 * 12, 12)


def test_without_a_number_of_iterations_smaller_data_is_read_once() -> None:
    default = sample_targets(config_of("--train-iters 21 --eval-interval 5 --global-batch-size 4"))
    assert default == SampleTargets(84, 5 * 400, 400, one_epoch_below=400)
    given = sample_targets(config_of("--train-iters 21 --eval-interval 5 --global-batch-size 4 --eval-iters 100"))
    assert given == SampleTargets(84, 5 * 400, 400)


def test_a_run_that_goes_on_unchanged_asks_for_the_same() -> None:
    config = config_of(f"{RUN} --micro-batch-size 1 --rampup-batch-size 2 1 9 --global-batch-size 4")
    begun = sample_targets(config)
    sizes = [2, 2, 2] + [3] + [4] * 17
    assert begun.train == sum(sizes)
    for iteration in (3, 4, 5, 10, 21):
        done = TrainState(iteration, sum(sizes[:iteration]), iteration // 5 * 12)
        assert sample_targets(config, done) == begun


def test_a_run_that_has_read_larger_batches_needs_more() -> None:
    done = TrainState(iteration=10, consumed_train_samples=160, consumed_valid_samples=2 * 48)
    targets = sample_targets(config_of(f"{RUN} --global-batch-size 6"), done)
    assert targets == SampleTargets(160 + 11 * 6, 96 + 3 * 18, 18)


def test_a_run_that_has_evaluated_more_often_needs_more() -> None:
    done = TrainState(iteration=20, consumed_train_samples=80, consumed_valid_samples=10 * 12)
    targets = sample_targets(
        config_of("--train-iters 21 --eval-interval 20 --eval-iters 3 --global-batch-size 4"), done
    )
    assert targets == SampleTargets(84, 120 + 12, 12)


def test_an_index_that_lacks_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format_version": 1, "tensors": {}}')
    with pytest.raises(CheckpointError, match="does not record the run that wrote it"):
        read_saved_run(tmp_path)
