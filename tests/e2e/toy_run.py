"""The command line of a small training on the text that the tests ship, and what two runs are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.index import read_index
from tests.harness.training_run import REPOSITORY

DATA = REPOSITORY / "tests" / "golden" / "train" / "t_u16"
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --init-method-std 0.06
    --distributed-backend gloo --seed 1234
"""
TRAINING = """
    --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 3 --split 900,50,50 --log-interval 1 --eval-iters 1 --eval-interval 10
"""


def toy_args(folder: Path, *more: str | Path, save: bool = True, data: bool = True) -> list[str]:
    """Return the flags of a run in ``folder``; a string in ``more`` may hold several words. The last value wins."""
    words = [*MODEL.split(), *TRAINING.split(), "--data-cache-path", str(folder / "cache")]
    if data:
        words += ["--data-path", str(DATA)]
    if save:
        words += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
    for item in more:
        words += [str(item)] if isinstance(item, Path) else item.split()
    return words


def exact_figures(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what must be bitwise equal in two runs, of each iteration or evaluation."""
    names = ("iteration", "split", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "loss_scale")
    names += ("skipped", "sample_ids_hash", "global_batch_size")
    return [tuple(line.get(name) for name in names) for line in lines]


def assert_same_checkpoints(left: Path, right: Path) -> None:
    """Assert that two checkpoints hold the same bytes in the same tensors and stand at the same point of the run."""
    shards = sorted(path.name for path in left.glob("*.safetensors"))
    assert shards
    assert shards == sorted(path.name for path in right.glob("*.safetensors"))
    ours, theirs = read_index(left), read_index(right)
    different = [name for name in ours.tensors | theirs.tensors if ours.tensors.get(name) != theirs.tensors.get(name)]
    assert not different
    for shard in shards:
        assert (left / shard).read_bytes() == (right / shard).read_bytes(), shard
    for key in ("progress", "optimizer", "scheduler", "layout"):
        assert ours.common[key] == theirs.common[key], key


def newest(folder: Path) -> Path:
    """Return the checkpoint that the tracker file points at."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    return folder / f"iter_{iteration:07d}"


def leftovers(folder: Path) -> list[str]:
    """Return the names in a run's folder that are neither a checkpoint nor a file that belongs there."""
    expected = ("iter_", "latest_checkpointed_iteration.txt", "metrics.jsonl", "run_record")
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(expected))
