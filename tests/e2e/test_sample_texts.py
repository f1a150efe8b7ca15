"""Texts generated during training: at every layout, without a bit of the run changed; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training

RUN = "--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 --cpu-matmul mkl --hidden-dropout 0.1"
ROPE = "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
)
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10"
SAMPLES = ("--sample-interval", "1", "--sample-tokens", "5", "--sample-prompts")


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        pytest.param(ROPE, 1, marks=pytest.mark.long),
        pytest.param(f"--tensor-model-parallel-size 2 {ROPE}", 2, marks=pytest.mark.long),
        pytest.param("--tensor-model-parallel-size 2", 2, marks=pytest.mark.long),
        (f"--pipeline-model-parallel-size 2 {ROPE}", 2),
        pytest.param(
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2, marks=pytest.mark.long
        ),
        (f"{EXPERTS} --expert-model-parallel-size 2 {ROPE}", 2),
        (f"{LATENT} --mtp-num-layers 1 --position-embedding-type rope --swiglu", 1),
    ],
    ids=["one", "tp", "tied", "pp", "dp", "experts", "latent, further tokens"],
)
def test_texts_come_and_the_run_stays_bitwise_the_same(tmp_path: Path, layout: str, nproc: int) -> None:
    plain = fork_training(toy_args(tmp_path / "plain", RUN, layout), nproc).check()
    words = [*toy_args(tmp_path / "run", RUN, layout), *SAMPLES, "1 2 3", "7"]
    run = fork_training(words, nproc).check()
    lines = [line for line in run.metrics if line.get("split") != "samples"]
    assert exact_figures(lines) == exact_figures(plain.metrics)
    samples = [line for line in run.metrics if line.get("split") == "samples"]
    assert [line["iteration"] for line in samples] == [1, 2, 3, 4]
    for line in samples:
        assert [sample["prompt"] for sample in line["samples"]] == ["1 2 3", "7"]
        # A text of a tied embedding may end at once.
        least = 1 if ROPE in layout else 0
        assert all(least <= len(sample["text"].split()) <= 5 for sample in line["samples"])
    assert run.stdout.count(" sample at iteration ") == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sample-interval", "1"), "--sample-interval 1 has nothing to continue"),
        ((*SAMPLES, " ".join("1" for _ in range(22))), "24"),
        (("--sample-prompts", "1"), "--sample-prompts"),
    ],
    ids=["no prompt", "too long", "no interval"],
)
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = fork_training([*toy_args(tmp_path, RUN), *words])
    assert run.statuses == (2,)
    errors = [line for line in (run.stdout + run.errors[0]).splitlines() if line.startswith("error: ")]
    assert any(said in line for line in errors)
