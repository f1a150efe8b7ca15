"""Each recipe of fp8 trains as well as bfloat16: a byte-level model on the prose of this repository's own documents."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.harness.forked_training import fork_training
from tests.harness.training_run import REPOSITORY

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 8 --distributed-backend gloo
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8 --global-batch-size 8 --bf16 --seed 1234
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --split 90,10,0 --log-interval 50
    --eval-iters 20 --eval-interval 1000
"""
FP8 = "--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-recipe"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the bytes of the documents as tokens; return the prefix of the files."""
    prefix = tmp_path_factory.mktemp("text") / "documents"
    paths = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for path in paths:
            builder.add_document(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16))
        builder.finalize()
    return prefix


@pytest.fixture(scope="module")
def validation_loss(text: Path):
    """Return a function that trains and gives the loss on the validation set."""

    @functools.cache
    def train(flags: str, num_iterations: int) -> float:
        metrics = text.parent / f"{flags.split()[-1] if flags else 'bf16'}-{num_iterations}.jsonl"
        args = [*MODEL.split(), "--train-iters", str(num_iterations), "--data-path", text, "--metrics-jsonl", metrics]
        args += ["--eval-iters", "8"] if num_iterations < 300 else []
        run = fork_training([*args, *flags.split()], timeout_s=900.0).check()
        loss: float = run.evaluations("validation")[-1]["lm_loss"]
        print(f"{flags or 'bf16'}, {num_iterations} iterations: validation loss {loss:.4f}")
        return loss

    return train


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=pytest.mark.long)])
def test_forty_iterations_end_near_bfloat16(validation_loss, recipe: str) -> None:
    expected = validation_loss("", 40)
    assert expected < 4.6
    assert validation_loss(f"{FP8} {recipe}", 40) == pytest.approx(expected, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "--fp8-format e4m3", "--no-fp8-wgrad", "--first-last-layers-bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_hundred_iterations_end_within_a_hundredth(validation_loss, recipe: str, more: str) -> None:
    expected = validation_loss("", 300)
    assert expected < 3.4
    assert validation_loss(f"{FP8} {recipe} {more}".strip(), 300) == pytest.approx(expected, rel=0.01)
