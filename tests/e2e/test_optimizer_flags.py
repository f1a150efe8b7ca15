"""--decoupled-lr and averages of weights in whole runs: in the log, in checkpoints, and at other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.conversion import convert
from megatron.checkpoint.formats.native import NativeSource
from megatron.cli.convert import parse_arguments
from megatron.core.errors import ConfigurationError
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training

FLAGS = "--train-iters 4 --lr-decay-iters 20 --eval-interval 1000"
DECOUPLED = "--decoupled-lr 2e-2 --decoupled-min-lr 1e-3 --untie-embeddings-and-output-weights"
OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction 0.3"


def run(folder: Path, *flags: str, nproc: int = 1) -> ForkedRun:
    words = toy_args(folder, FLAGS, *flags)
    return fork_training([*words, "--metrics-jsonl", folder / "metrics.jsonl"], nproc).check()


def test_a_rate_of_its_own_is_logged_saved_and_kept(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", DECOUPLED)
    # A warm-up of three iterations to 2e-2, then the cosine's first step.
    assert [line["decoupled_learning_rate"] for line in whole.iterations()][:3] == pytest.approx(
        [0, 2e-2 / 3, 4e-2 / 3]
    )
    assert " learning rate: 1.000000E-03 | decoupled learning rate: 6.666667E-03 | global batch size:" in whole.stdout
    for form in ("", "--ckpt-format torch_dist", "--ckpt-format torch"):
        folder = tmp_path / f"parts {form}"
        run(folder, DECOUPLED, form, "--exit-interval 2")
        assert exact_figures(run(folder, DECOUPLED).iterations()) == exact_figures(whole.iterations())


@pytest.mark.long
def test_it_moves_the_embedding_and_the_output_layer_only(tmp_path: Path) -> None:
    equal = "--decoupled-lr 3e-3 --decoupled-min-lr 3e-4 --untie-embeddings-and-output-weights"
    plain = run(tmp_path / "plain", "--untie-embeddings-and-output-weights")
    assert exact_figures(run(tmp_path / "equal", equal).iterations()) == exact_figures(plain.iterations())
    other = run(tmp_path / "other", DECOUPLED, nproc=2)
    assert other.iterations()[-1]["lm_loss"] != plain.iterations()[-1]["lm_loss"]
    offloaded = run(tmp_path / "offloaded", DECOUPLED, OFFLOAD, nproc=2)
    assert exact_figures(offloaded.iterations()) == exact_figures(other.iterations())


def test_another_rate_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path, DECOUPLED, "--exit-interval 2")
    refused = fork_training(toy_args(tmp_path, FLAGS, DECOUPLED, "--decoupled-lr 1e-2"))
    assert refused.statuses == (2,)
    (line,) = refused.errors[0].splitlines()
    assert "(--decoupled-lr 0.02 → 0.01); pass --decoupled-lr 0.02 to keep the recorded value, " in line


FOUR = "--train-iters 4 --lr-decay-iters 20 --eval-interval 2 --save-interval 2 --lr 1e-2 --lr-warmup-iters 0"
SHARDED = "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def run_averaged(folder: Path, nproc: int, *flags: str) -> tuple[dict[tuple[int, str], float], str]:
    """Return the evaluations' losses by iteration and set, and what the run printed."""
    words = [*toy_args(folder, FOUR, *flags), "--metrics-jsonl", str(folder / "metrics.jsonl")]
    done = fork_training(words, nproc).check()
    lines = done.metrics
    return {(line["iteration"], line["split"]): line["lm_loss"] for line in lines if "split" in line}, done.stdout


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, str], float], str]:
    folder = tmp_path_factory.mktemp("averaged")
    return folder, *run_averaged(folder, 4, SHARDED, "--ema-decay 0.5")


def test_the_average_is_measured_on_the_same_samples(
    averaged: tuple[Path, dict[tuple[int, str], float], str], tmp_path: Path
) -> None:
    _, losses, output = averaged
    assert "validation loss at iteration 2 on validation set with averaged weights | lm loss value" in output
    assert losses[2, "validation"] != losses[2, "validation_ema"]
    alone, _ = run_averaged(tmp_path, 1, "--ema-decay 0.5 --exit-interval 2")
    for split in ("validation", "validation_ema"):
        assert alone[2, split] == pytest.approx(losses[2, split], rel=1e-5)
    # An average that keeps nothing is the weights, and trains the same.
    nothing, _ = run_averaged(tmp_path / "nothing", 1, "--ema-decay 0 --exit-interval 2")
    assert nothing[2, "validation_ema"] == nothing[2, "validation"] == alone[2, "validation"]


def test_it_goes_on_at_another_layout_and_begins_anew_where_there_is_none(
    averaged: tuple[Path, dict[tuple[int, str], float], str], tmp_path: Path
) -> None:
    folder, losses, _ = averaged
    load = f"--load {folder / 'checkpoints'} --ckpt-step 2"
    found, output = run_averaged(tmp_path / "with", 1, load, "--ema-decay 0.5")
    assert found[4, "validation_ema"] == pytest.approx(losses[4, "validation_ema"], rel=1e-5)
    assert "starts from the loaded weights" not in output
    without, _ = run_averaged(tmp_path / "without", 1, load)
    assert without[4, "validation"] == found[4, "validation"]
    assert (4, "validation_ema") not in without
    _, output = run_averaged(tmp_path / "without", 1, "--train-iters 6 --override-opt-param-scheduler --ema-decay 0.5")
    assert (
        "--ema-decay: the average starts from the loaded weights, because the checkpoint contains no averaged weights"
        in output
    )


def test_the_converter_writes_the_average_in_place_of_the_weights(
    averaged: tuple[Path, dict[tuple[int, str], float], str], tmp_path: Path
) -> None:
    folder, *_ = averaged
    words = ["--load-dir", str(folder / "checkpoints"), "--ema", "--save-dir"]
    convert(parse_arguments([*words, str(tmp_path / "native")])[0], print)
    source, result = NativeSource(newest(folder / "checkpoints")), NativeSource(newest(tmp_path / "native"))
    names = [name for name in source.tensors if name.startswith("model.")]
    assert sorted(result.tensors) == sorted(names)
    for name in names:
        average = source.read(name.replace("model.", "optimizer.ema.", 1))
        assert torch.equal(result.read(name), average)
        assert not torch.equal(average, source.read(name))
    words[1] = str(tmp_path / "native")
    with pytest.raises(ConfigurationError, match=r"contains no averaged \(EMA\) weights; omit --ema"):
        convert(parse_arguments([*words, str(tmp_path / "again")])[0], print)
