"""Training on fill-in-the-middle tasks: the same at every layout and after a resume, and special tokens asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training
from tests.harness.training_run import run_training

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
        "error: --fim-prefix-token <fim_prefix>: the tokenizer does not read it (NullTokenizer"
    )
    assert done.stderr.endswith("give --fim-prefix-token a special token that it has\n")
    assert done.stderr.count("\n") == 1
