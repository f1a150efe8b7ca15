"""Texts generated during training: one process's at every layout, without a bit of the run changed; what is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.core.device import Device
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, Program, fork_training
from tests.harness.graph_stand_in import RerunBackend
from tests.harness.training_run import REPOSITORY, run_command

RUN = "--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 --cpu-gemm-backend mkl --hidden-dropout 0.1"
ROPE = "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
)
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
CHUNKS = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params"
FLOAT8 = "--bf16 --fp8-format hybrid --seq-length 32 --max-position-embeddings 32 --ffn-hidden-size 64"
GRAPHS = "--attention-dropout 0 --cuda-graph-impl local --cuda-graph-warmup-steps 1"
SAMPLES = ("--generate-interval", "1", "--sample-tokens", "5", "--generate-prompts")
PROMPTS = ("1 2 3", "7")


def train_with_graphs(argv: Sequence[str], faults: Faults) -> int:
    """Train, with work that is run again for graphs."""
    with patch.object(Device, "graph_backend", lambda device: RerunBackend()):
        return run_with_faults(argv, faults)


def train_with_samples(folder: Path, layout: str, nproc: int, program: Program = run_with_faults) -> ForkedRun:
    """Train without texts and with them; return the second run, which has trained bit by bit as the first."""
    plain = fork_training(toy_args(folder / "plain", RUN, layout), nproc, program=program).check()
    words = [*toy_args(folder / "run", RUN, layout), *SAMPLES, *PROMPTS]
    run = fork_training(words, nproc, program=program).check()
    lines = [line for line in run.metrics if line.get("split") != "samples"]
    assert exact_figures(lines) == exact_figures(plain.metrics)
    assert_same_checkpoints(*(newest(folder / name / "checkpoints") for name in ("plain", "run")))
    return run


def samples_of(run: ForkedRun) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line.get("split") == "samples"]


def texts_of(run: ForkedRun) -> list[list[str]]:
    return [[sample["text"] for sample in line["samples"]] for line in samples_of(run)]


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        pytest.param(ROPE, 1, marks=pytest.mark.long),
        pytest.param(f"--tensor-model-parallel-size 2 {ROPE}", 2, marks=pytest.mark.long),
        pytest.param("--tensor-model-parallel-size 2", 2, marks=pytest.mark.long),
        (f"{CHUNKS} {ROPE}", 2),
        pytest.param(SHARDED, 2, marks=pytest.mark.long),
        (f"{EXPERTS} --expert-model-parallel-size 2 {ROPE}", 2),
        (f"{LATENT} --mtp-num-layers 1 --position-embedding-type rope --swiglu", 1),
    ],
    ids=["one", "tp", "tied", "chunks", "dp", "experts", "latent, further tokens"],
)
def test_texts_come_and_the_run_stays_bitwise_the_same(tmp_path: Path, layout: str, nproc: int) -> None:
    run = train_with_samples(tmp_path, layout, nproc)
    assert [line["iteration"] for line in samples_of(run)] == [1, 2, 3, 4]
    assert all([sample["prompt"] for sample in line["samples"]] == [*PROMPTS] for line in samples_of(run))
    # A text may end at once.
    assert max(len(text.split()) for texts in texts_of(run) for text in texts) == 5
    assert run.stdout.count(" sample at iteration ") == 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "model", "nproc"),
    [
        (SP, ROPE, 2),
        (SP, "", 2),
        ("--context-parallel-size 2", ROPE, 2),
        (f"{SP} --context-parallel-size 2 --tp-comm-overlap", ROPE, 4),
        (f"{CHUNKS} {SP} --use-distributed-optimizer", f"{ROPE} --num-layers 4", 4),
        (f"{SHARDED} {SP}", ROPE, 4),
        (f"{WEIGHTS} {SP}", ROPE, 4),
        (f"{WEIGHTS} --context-parallel-size 2", "", 4),
        ("--expert-model-parallel-size 2 --context-parallel-size 2", f"{EXPERTS} {ROPE}", 2),
        (f"{SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", f"{EXPERTS} {ROPE}", 2),
        (SP, f"{LATENT} --mtp-num-layers 1 --position-embedding-type rope --swiglu", 2),
    ],
)
def test_texts_are_those_of_one_process(tmp_path: Path, layout: str, model: str, nproc: int) -> None:
    """Trained in float32: layouts differ in last bits, and the texts do not."""
    words = [*toy_args(tmp_path / "one", RUN, model), *SAMPLES, *PROMPTS]
    alone = texts_of(fork_training(words).check())
    assert len(alone) == 4
    assert texts_of(train_with_samples(tmp_path, f"{model} {layout}", nproc)) == alone


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "nproc"), [("", 1), (f"{CHUNKS} {SP}", 4), (f"{SP} {FLOAT8}", 2)], ids=["one", "chunks", "float8"]
)
def test_texts_of_a_run_with_graphs_are_those_of_one_without(tmp_path: Path, layout: str, nproc: int) -> None:
    """Graphs are work that is run again: these ranks have no CUDA device."""
    words = [*toy_args(tmp_path / "eager", RUN, ROPE, "--attention-dropout 0", layout), *SAMPLES, *PROMPTS]
    eager = fork_training(words, nproc).check()
    graphed = train_with_samples(tmp_path, f"{ROPE} {GRAPHS} {layout}", nproc, train_with_graphs)
    assert texts_of(graphed) == texts_of(eager)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_samples_of_a_run_in_fp8_are_what_its_checkpoint_generates(tmp_path: Path, recipe: str) -> None:
    """Both in 16 bits."""
    run = train_with_samples(tmp_path, f"{ROPE} {FLOAT8} --fp8-recipe {recipe}", 1)
    command = [sys.executable, REPOSITORY / "tools" / "text_generation_cli.py"]
    words = ["--load", tmp_path / "run" / "checkpoints", "--greedy", "--tokens-to-generate", "5"]
    for prompt, text in zip(PROMPTS, texts_of(run)[-1], strict=True):
        generated = run_command([*command, *words, "--prompt", prompt]).check()
        assert generated.stdout.strip() == f"{prompt} {text}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "nproc"),
    [
        (f"--fp8-recipe delayed {SP} {CHUNKS}", 4),
        ("--fp8-recipe delayed --context-parallel-size 2", 2),
        (f"--fp8-recipe tensorwise --fp8-param-gather {SHARDED}", 2),
    ],
    ids=["chunks", "cp", "gathered in fp8"],
)
def test_samples_change_nothing_of_a_run_in_fp8(tmp_path: Path, more: str, nproc: int) -> None:
    """What delayed scaling remembers is in the checkpoints that are compared."""
    assert len(texts_of(train_with_samples(tmp_path, f"{ROPE} {FLOAT8} {more}", nproc))) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--generate-interval", "1"), "--generate-interval 1 has no prompts"),
        ((*SAMPLES, " ".join("1" for _ in range(22))), "24"),
        (("--generate-prompts", "1"), "--generate-prompts"),
    ],
    ids=["no prompt", "too long", "no interval"],
)
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = fork_training([*toy_args(tmp_path, RUN), *words])
    assert run.statuses == (2,)
    errors = [line for line in (run.stdout + run.errors[0]).splitlines() if line.startswith("error: ")]
    assert any(said in line for line in errors)
