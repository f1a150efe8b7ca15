"""--decoupled-lr in whole runs: the embedding's own rate, in the log, in checkpoints, and beside offloaded state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
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
    assert "(--decoupled-lr 0.02 → 0.01); give --decoupled-lr 0.02 to go on as it was, " in line
