"""The same GPT on real text with GPT-2's vocabulary gives the same losses at every layout."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import pytest

from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.training_run import REPOSITORY, run_command

DATA = REPOSITORY.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not (DATA / "wikitext2.jsonl").is_file(),
    reason="WikiText-2 and GPT-2's vocabulary are not beside the repository (../shared)",
)
VOCABULARY = ["--vocab-file", DATA / "gpt2-vocab.json", "--merge-file", DATA / "gpt2-merges.txt"]
LAYOUTS = {
    "tp1": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "dp2": (2, ""),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}
MODEL = """
    --num-layers 4 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type GPT2BPETokenizer --split 900,80,20 --seed 1234 --distributed-backend gloo --log-interval 20
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.01
"""
SHORT = """
    --hidden-size 32 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2
    --train-iters 20 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 4 --eval-interval 20 --eval-iters 4
"""
WHOLE = """
    --hidden-size 128 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 8
    --train-iters 200 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 20 --eval-interval 100 --eval-iters 8
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocess WikiText-2 as users do; return the prefix of its files."""
    prefix = tmp_path_factory.mktemp("wikitext") / "wikitext2"
    command = [sys.executable, REPOSITORY / "tools" / "preprocess_data.py", "--input", DATA / "wikitext2.jsonl"]
    command += ["--output-prefix", prefix, "--tokenizer-type", "GPT2BPETokenizer", *VOCABULARY]
    run_command([*command, "--append-eod", "--workers", "2"]).check()
    return prefix.parent / "wikitext2_text_document"


@pytest.fixture(scope="module")
def train(text: Path):
    """Return a function that trains once for each layout and length."""

    @functools.cache
    def run(layout: str, length: str) -> ForkedRun:
        num_processes, flags = LAYOUTS[layout]
        files = ["--data-path", text, *VOCABULARY, "--metrics-jsonl", text.parent / f"{layout}-{hash(length)}.jsonl"]
        args = [*MODEL.split(), *length.split(), *files, *flags.split()]
        return fork_training(args, num_processes, timeout_s=1800.0).check()

    return run


def losses(run: ForkedRun) -> list[float]:
    return [line["lm_loss"] for line in run.iterations()]


def assert_same_losses(result: ForkedRun, reference: ForkedRun) -> None:
    ours, expected = losses(result), losses(reference)
    assert len(ours) == len(expected) >= 20
    differences = [abs(a - b) / b for a, b in zip(ours, expected)]
    print(f"relative differences: first 20 {max(differences[:20]):.2e}, all {max(differences):.2e}")
    assert max(differences[:20]) <= 1e-5
    assert max(differences) <= 1e-3
    assert [line["sample_ids_hash"] for line in result.iterations()] == [
        line["sample_ids_hash"] for line in reference.iterations()
    ]


@pytest.mark.long
def test_losses_begin_at_the_logarithm_of_the_vocabulary(train) -> None:
    first = losses(train("tp1", SHORT))[0]
    assert first == pytest.approx(math.log(50257), rel=0.01)


def test_twenty_iterations_agree(train) -> None:
    assert_same_losses(train("tp2-dp2", SHORT), train("tp1", SHORT))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "dp2", "tp2-dp2"])
def test_two_hundred_iterations_agree(train, layout: str) -> None:
    assert_same_losses(train(layout, WHOLE), train("tp1", WHOLE))


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_loss_falls_below_seven_and_a_half(train, layout: str) -> None:
    result = train(layout, WHOLE)
    assert losses(result)[0] == pytest.approx(10.9, abs=0.1)
    evaluations = [line["lm_loss"] for line in result.evaluations("validation")]
    print(f"{layout}: validation losses {evaluations}, test {result.evaluations('test')}")
    assert evaluations[-1] < 7.5
