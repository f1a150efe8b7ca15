"""Ten iterations of the whole training against reference numbers made with NVIDIA's own code, at several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training

FOLDER = Path(__file__).parent / "train"
TOLERANCE = 1e-5
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 3 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --init-method-std 0.06
    --tokenizer-type NullTokenizer --vocab-size 127 --split 949,50,1 --distributed-backend gloo
    --no-bias-gelu-fusion --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-iters 1
    --eval-interval 100 --seed 1234 --make-vocab-size-divisible-by 32
"""
SMALL_BUCKETS = "--ddp-bucket-size 9000"
LAYOUTS = [
    pytest.param(1, "", "tp1", id="tp1"),
    pytest.param(2, "--tensor-model-parallel-size 2", "tp1", id="tp2", marks=pytest.mark.long),
    pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", "tp1", id="tp2-sp", marks=pytest.mark.long),
    pytest.param(2, "", "dp2", id="dp2", marks=pytest.mark.long),
    pytest.param(
        4, "--tensor-model-parallel-size 2 --sequence-parallel", "dp2", id="tp2-sp-dp2", marks=pytest.mark.long
    ),
    pytest.param(2, "--use-distributed-optimizer", "dp2", id="dp2-distributed-optimizer", marks=pytest.mark.long),
    pytest.param(
        2,
        f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {SMALL_BUCKETS}",
        "dp2",
        id="dp2-distributed-optimizer-overlap",
    ),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --data-parallel-sharding-strategy optim_grads "
        f"--overlap-grad-reduce --overlap-param-gather {SMALL_BUCKETS}",
        "dp2",
        id="tp2-sp-dp2-sharded-gradients",
    ),
    pytest.param(
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "tp1",
        id="full-recompute",
        marks=pytest.mark.long,
    ),
    pytest.param(
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective",
        "tp1",
        id="selective-recompute-tp2-sp",
        marks=pytest.mark.long,
    ),
    pytest.param(1, "--calculate-per-token-loss", "tp1", id="per-token-loss", marks=pytest.mark.long),
    pytest.param(2, "--calculate-per-token-loss", "dp2", id="dp2-per-token-loss", marks=pytest.mark.long),
    pytest.param(1, "--micro-batch-size 8", "tp1", id="one-micro-batch", marks=pytest.mark.long),
    pytest.param(2, "--context-parallel-size 2", "tp1", id="cp2-ring", marks=pytest.mark.long),
    pytest.param(
        2,
        "--context-parallel-size 2 --cp-comm-type all_gather a2a --calculate-per-token-loss --overlap-grad-reduce",
        "tp1",
        id="cp2-all-gather-and-all-to-all-per-token-loss",
    ),
    pytest.param(
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "tp1",
        id="cp2-tp2-sp-full-recompute",
        marks=pytest.mark.long,
    ),
    pytest.param(4, "--context-parallel-size 2", "dp2", id="cp2-dp2", marks=pytest.mark.long),
    pytest.param(2, "--pipeline-model-parallel-size 2", "tp1", id="pp2", marks=pytest.mark.long),
    pytest.param(
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        "tp1",
        id="pp2-zero-bubble",
        marks=pytest.mark.long,
    ),
    pytest.param(
        2,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L",
        "tp1",
        id="pp2-virtual-stages-embedding-layer-layer-loss",
    ),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "tp2pp2_from_tp1",
        id="tp2-pp2",
        marks=pytest.mark.long,
    ),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
        " --pipeline-model-parallel-layout E|t|t|L --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
        "tp2pp2_from_tp1",
        id="tp2-sp-pp2-virtual-stages-full-recompute",
    ),
    pytest.param(
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
        "tp1",
        id="pp2-cp2",
    ),
    pytest.param(
        4,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --use-distributed-optimizer",
        "dp2",
        id="pp2-zero-bubble-dp2-distributed-optimizer",
    ),
]


@pytest.mark.default(1)
@pytest.mark.parametrize(("num_processes", "layout", "reference"), LAYOUTS)
def test_training_meets_reference_numbers(num_processes: int, layout: str, reference: str, tmp_path: Path) -> None:
    files = ["--data-path", FOLDER / "t_u16", "--data-cache-path", tmp_path / "cache"]
    args = [*FLAGS.split(), *files, "--metrics-jsonl", tmp_path / "metrics.jsonl", *layout.split()]
    faults = Faults(weights=str(FOLDER / "gpt2_init.npz"))
    iterations = fork_training(args, num_processes, faults).check().iterations()
    expected = [json.loads(line) for line in (FOLDER / f"{reference}.jsonl").read_text().splitlines()]
    assert len(iterations) == len(expected) == 10
    for ours, theirs in zip(iterations, expected):
        assert ours["lm_loss"] == pytest.approx(theirs["loss"]["lm loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
        assert ours["learning_rate"] == pytest.approx(theirs["lr_used"], rel=TOLERANCE, abs=0.0)
